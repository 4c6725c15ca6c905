"""Blocks of drafts that break off while processes verify them: all other tokens and logits are Transformers' own.

About half a minute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from main_node.answer import Answer
from scheduler import types as t
from scheduler.errors import RequestCancelledError
from support.faults.nodes import Nodes
from support.nodes.exact import WAIT_S, WHOLE, check_together
from support.paths import DEMO
from wire import messages as w

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]
TOKENS = 48
STEP_S, ROW_S = 0.1, 0.001
"""What the rule behind `auto` is told that a step takes, and each of its rows: here, where loads take no time, it would
draft or not as the machine is busy."""


@pytest.fixture(scope="module")
def all_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    made = Nodes(DEMO, tmp_path_factory.mktemp("blocks") / "store")
    made.shadow.close()
    made.shadow = made.node("shadow", 0, shadow="nf4")  # some of its drafts are wrong
    yield made
    made.close()


@pytest.fixture
def nodes(all_nodes: Nodes) -> Iterator[Nodes]:
    yield all_nodes
    all_nodes.mend()


@pytest.fixture
def expected(reference: Any) -> list[Any]:
    return [reference("float32", number, TOKENS) for number in (0, 4, 8)]


class Watched:
    """A cluster that drafts. It keeps the `rows` of its decoding passes, by request, and counts its `blocks`."""

    def __init__(self, nodes: Nodes, draft: int | str) -> None:
        self.cluster = nodes.cluster(shadow=True, draft=draft, **WHOLE)
        self.main, self.engine = self.cluster.main, self.cluster.main.engine
        self.rows: dict[int, list[int]] = defaultdict(list)
        self.blocks = 0
        self.at_gate: Callable[[t.Visit, Any], None] = lambda visit, layer: None
        """Called with each gate that has fired, once its computations are on their way."""
        self._fired, self.engine.on_gate_fired = self.engine.on_gate_fired, self._gate_fired  # type: ignore[method-assign]
        steps = self.main.steps
        self._stepped, steps._on_step_ended = steps._on_step_ended, self._step_ended

    def _gate_fired(self, visit: t.Visit, layer: Any) -> None:
        self._fired(visit, layer)
        if visit.layer == 0 and (layer.is_block or len(layer.hidden) == 1):
            self.rows[visit.request].append(len(layer.hidden))
            self.blocks += layer.is_block
        self.at_gate(visit, layer)

    def _step_ended(self, requests: Any, rows: int, seconds: float, decoding: bool) -> None:
        self._stepped(requests, rows, STEP_S + ROW_S * rows, decoding)


def kill(node: Any) -> None:
    """It is gone when this returns."""
    node.kill()
    node.process.join(WAIT_S)


def test_a_worker_is_killed_with_rows_of_a_block_to_compute(nodes: Nodes, expected: Any) -> None:
    watched = Watched(nodes, 4)
    peers = watched.engine.peers
    ask, asked = peers.ask, []

    def asking(number: int, command: t.Load | t.Compute, message: w.Message) -> None:
        """Before the fifth computation of several drafts' rows is sent to its worker, that one is killed."""
        if isinstance(command, t.Compute) and isinstance(message, w.Compute) and len(message.passes) > 1:
            asked.append(command)
            if len(asked) == 5:
                kill(nodes.workers[command.worker])
        ask(number, command, message)

    peers.ask = asking  # type: ignore[method-assign]
    reports = [one.report for one in check_together(watched.main, expected)]
    lost = asked[4]
    assert watched.cluster.lost == [f"worker {lost.worker}"]
    again = [one for one in asked[5:] if (one.visit, one.expert, one.start) == (lost.visit, lost.expert, lost.start)]
    assert again
    assert all(one.worker != lost.worker for one in again)
    assert all(0 < report.accepted <= report.drafted for report in reports)
    assert all(report.exact for report in reports)


def test_the_shadow_is_killed_while_it_drafts(nodes: Nodes, expected: Any) -> None:
    watched = Watched(nodes, "auto")
    offer, offered, killed = watched.engine._on_draft, [], []

    def offering(one: w.Draft) -> None:
        """With the first draft after three blocks have begun, it is killed."""
        offered.append(one)
        offer(one)
        if not killed and watched.blocks > 2:
            killed.append(one)
            kill(nodes.shadow)

    watched.engine._on_draft = offering  # type: ignore[method-assign]
    reports = [one.report for one in check_together(watched.main, expected)]
    assert watched.cluster.lost == ["shadow"]
    assert killed
    assert 0 < sum(report.accepted for report in reports) <= len(offered)
    assert [rows[-5:] for rows in watched.rows.values()] == [[1] * 5] * len(expected)
    assert all(report.exact for report in reports)


def read(answer: Answer) -> list[int]:
    """Its tokens, until it ends or is cancelled."""
    tokens = []
    try:
        for step in answer:
            if step.token_id is not None:
                tokens.append(step.token_id)
    except RequestCancelledError:
        assert answer.request.cancelled.is_set()
    return tokens


def test_a_request_is_cancelled_in_a_layer_with_blocks_of_others(nodes: Nodes, expected: Any) -> None:
    """They wait for the same experts."""
    watched = Watched(nodes, "auto")
    main, shared = watched.main, []
    answers = [main.generate(one.prompt, TOKENS, ignore_eos=True) for one in expected]
    given_up, others = answers[1], [answers[0], answers[2]]

    def cancelling(visit: t.Visit, layer: Any) -> None:
        under_way = {at: one for at, one in watched.engine._layers.items() if at.layer == visit.layer and one.is_block}
        mine = under_way.pop(next((at for at in under_way if at.request == given_up.number), visit), None)
        same = [at.request for at, one in under_way.items() if mine and set(dict(one.rows)) & set(dict(mine.rows))]
        if same and not given_up.request.cancelled.is_set():
            shared.extend(same)
            given_up.cancel()

    watched.at_gate = cancelling
    logits: dict[int, list[torch.Tensor]] = defaultdict(list)
    main.on_logits = lambda number, values: logits[number].append(values)
    with ThreadPoolExecutor(len(answers)) as pool:
        got = [one.result(WAIT_S) for one in [pool.submit(read, answer) for answer in answers]]
    assert shared
    assert 0 < len(got[1]) < TOKENS
    assert got[1] == expected[1].tokens[: len(got[1])]
    for answer, tokens, alone in ((answers[n], got[n], expected[n]) for n in (0, 2)):
        assert tokens == alone.tokens
        assert all(torch.equal(a, b) for a, b in zip(logits[answer.number], alone.logits, strict=True))
    assert all(max(watched.rows[answer.number]) > 1 for answer in others)
    assert watched.cluster.lost == []

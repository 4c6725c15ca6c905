"""What a cluster counts, beside the reports of its answers and what was said on its streams."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from itertools import islice
from typing import Any

import pytest

from main_node import collect_figures as reading
from main_node.answer import collect
from main_node.collect_figures import figures_of
from main_node.engine.roster import Roster
from main_node.figures import NodeFigures
from main_node.report import Report
from scheduler.errors import RequestCancelledError
from support.nodes.engine_world import Desk, good, once, rows_of, silent, worker_ready
from support.nodes.tapped_cluster import TappedCluster
from wire import messages as w
from wire.traffic import MessageCounts, Traffic

pytestmark = pytest.mark.timeout(90)
TOKENS = 8
SAME = (
    "loads",
    "prefill_loads",
    "reloads",
    "named",
    "hits",
    "host_computed",
    "stall_s",
    "prefill_stall_s",
    "drafted",
    "accepted",
    "prompt_tokens",
    "unpredicted",
)
"""Sums of the reports' figures of these names."""


def check_sums(totals: Any, reports: list[Report]) -> None:
    for name in SAME:
        assert getattr(totals, name) == pytest.approx(sum(getattr(one, name) for one in reports)), name
    assert totals.answer_tokens == sum(one.new_tokens for one in reports)


def by_name(nodes: tuple[NodeFigures, ...]) -> dict[str, NodeFigures]:
    return {node.name: node for node in nodes}


@pytest.mark.slow
def test_figures_are_the_sums_of_the_reports(cluster_of: Any, expected: Any, nf4: Any) -> None:
    cluster: TappedCluster = cluster_of(slots=2)
    told = cluster.join_shadow(nf4)
    prompts = {1: expected.prompt, 2: expected.prompt[:9]}
    reports = [cluster.answer(prompt, TOKENS, ignore_eos=True)[1] for prompt in prompts.values()]
    found = figures_of(cluster.main)
    totals = found.totals
    assert totals.answer_tokens == 2 * TOKENS
    assert totals.steps == {1: 2 * TOKENS}
    assert totals.named == sum(report.named for report in reports) == 2 * 8 * 2 * (TOKENS - 1)
    # Until a request is closed its shadow may still bring loads for a token that nobody asks for.
    assert totals.loads - sum(report.loads for report in reports) in range(2 * 8 * 2 + 1)
    assert totals.loads == cluster.loads()
    # Recall, from what the shadow said and what the gates named.
    heard = [m for m in told.heard if isinstance(m, w.Prediction)]
    said = {(m.request, m.position, m.layer): set(m.experts) for m in heard}
    times = Counter((m.request, m.position, m.layer) for m in heard)
    decode = {visit: named for visit, named in cluster.gates.items() if visit.position >= len(prompts[visit.request])}
    assert totals.activated == totals.named
    once_said = sum(len(said[tuple(visit)] & named) for visit, named in decode.items() if times[tuple(visit)] == 1)
    # What is predicted again after another token may come when the answer has its last one.
    again = sum(len(named) for visit, named in decode.items() if times[tuple(visit)] > 1)
    assert once_said <= totals.predicted <= once_said + again
    assert totals.predicted / totals.activated == pytest.approx(sum(r.recall or 0 for r in reports) / 2)
    # Nodes, from the streams.
    nodes = by_name(found.nodes)
    assert list(nodes) == ["main", "worker 0", "worker 1", "worker 2", "worker 3", "shadow"]
    for number, tap in enumerate(cluster.taps):
        loaded = [m for m in tap.heard if isinstance(m, w.Loaded)]
        node = nodes[f"worker {number}"]
        assert (node.loads, node.bytes_loaded) == (len(loaded), sum(m.nbytes for m in loaded))
        assert node.load_s == pytest.approx(sum(m.seconds for m in loaded))
        assert node.memory_bytes == reports[-1].memory_bytes["workers"][number]  # type: ignore[index]
    assert nodes["main"].memory_bytes == cluster.main.device_bytes
    assert nodes["shadow"].memory_bytes == reports[-1].memory_bytes["shadow"]
    assert all(node.up and not node.suspect and (node.lost, node.rejoined) == (0, 0) for node in found.nodes)
    assert all((node.stream_bytes, node.sent_bytes) == ((), None) for node in found.nodes), "in memory"
    assert (found.answered, found.waiting) == (0, 0)
    assert found.cluster == reports[-1].cluster


def test_an_answer_counts_as_it_goes_and_when_it_is_given_up(cluster: TappedCluster, expected: Any) -> None:
    answer = cluster.main.generate(expected.prompt, TOKENS, ignore_eos=True)
    assert figures_of(cluster.main).totals.prompt_tokens == 0, "nothing is read before the first token is asked for"
    for count, _ in enumerate(islice(answer, 3), 1):
        found = figures_of(cluster.main)
        assert (found.totals.prompt_tokens, found.totals.answer_tokens) == (len(expected.prompt), count)
        assert found.totals.loads == cluster.loads()
        assert (found.answered, found.waiting) == (1, 0)
    under_way = figures_of(cluster.main).totals
    assert (under_way.named, under_way.reloads) == (2 * 8 * 2, 2 * 8 * 2)
    answer.cancel()
    with pytest.raises(RequestCancelledError):
        next(answer)
    after = figures_of(cluster.main)
    assert after.totals == under_way
    assert after.answered == 0
    _, report = cluster.answer(expected.prompt, 2, ignore_eos=True)
    both = figures_of(cluster.main).totals
    assert both.answer_tokens == 3 + 2
    assert both.stall_s == pytest.approx(under_way.stall_s + report.stall_s)
    assert both.loads == under_way.loads + report.loads


@pytest.mark.slow
def test_several_at_once_and_drafts(embedded: Any, gsm8k: list[str]) -> None:
    """Steps of two requests, blocks, an answer that ends within a block."""
    from odmoe.text import load_tokenizer
    from support.paths import DEMO

    cluster = embedded(workers=2, shadow="none", draft=3, draft_from="prompt")
    prompts = [load_tokenizer(DEMO)(text)["input_ids"] for text in gsm8k[:2]]
    with closing(cluster.generate(prompts[0], 24, ignore_eos=True)) as first:
        next(first)  # it stays open while the other is read, in steps of its own
        reports = [collect(cluster.generate(prompts[1], 24, ignore_eos=True))[1]]
        reports.append(collect(first)[1])
    totals = cluster.figures().totals
    check_sums(totals, reports)
    assert 0 < totals.accepted < totals.drafted
    assert totals.activated == totals.predicted == 0


def test_a_node_that_is_lost_and_comes_back(desk: Desk) -> None:
    def facts() -> list[tuple[str, bool, int, int, int]]:
        nodes = desk.engine.peers.roster.figures()
        return [(node.name, node.up, node.lost, node.rejoined, node.loads) for node in nodes]

    first, _ = desk.workers(good, good)
    desk.shadow()
    desk.open()
    desk.check(rows_of(1, experts=(0, 1)))
    desk.settle()
    loads = [len(fake.of(w.Load)) for fake in desk.fakes]
    assert facts() == [
        ("worker 0", True, 0, 0, loads[0]),
        ("worker 1", True, 0, 0, loads[1]),
        ("shadow", True, 0, 0, 0),
    ]
    first.reply.close()
    assert facts()[0] == ("worker 0", False, 1, 0, loads[0])
    desk.join(0, desk.fake(good))
    assert facts()[0] == ("worker 0", True, 1, 1, loads[0]), "its counters go on"
    desk.join(0, desk.fake(good))
    assert facts()[0] == ("worker 0", True, 2, 2, loads[0]), "another one has taken its place"
    assert desk.engine.peers.lost == desk.engine.peers.rejoined == ["worker 0"] * 2


def test_bytes_of_its_earlier_streams_count() -> None:
    roster, streams = Roster(), [Traffic(MessageCounts(), MessageCounts()) for _ in range(3)]

    def carried() -> tuple[dict[str, int], int | None, int | None]:
        (node,) = roster.figures()
        return dict(node.stream_bytes), node.sent_bytes, node.received_bytes

    for count, stream in enumerate(streams):
        if count:
            roster.on_lost("worker", 0)
        roster.on_joined("worker", 0, worker_ready(1), None, stream)
        assert carried() == ({"to_workers": 100 * count, "from_workers": 30 * count}, 107 * count, 30 * count)
        stream.sent.add(w.Compute, 100)
        stream.sent.add(w.Load, 7)
        stream.received.add(w.Computed, 30)
        together = {"to_workers": 100 * (count + 1), "from_workers": 30 * (count + 1)}
        assert carried() == (together, 107 * (count + 1), 30 * (count + 1))
        assert roster.token_traffic() == together | {"to_shadow": 0, "from_shadow": 0}


def test_a_node_that_says_nothing_is_not_waited_for(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "FIRST_S", 0.01)
    mute = once(w.AskUsage, silent, always=True)
    quiet, other = desk.workers(mute, mute)

    def held() -> list[int | None]:
        nodes = reading._peers(desk.engine.peers, reading._usage(desk.engine))
        assert [(node.name, node.up) for node in nodes] == [("worker 0", True), ("worker 1", True)]
        return [node.memory_bytes for node in nodes]

    other.say(w.WorkerUsage(1, 300, 0, 0))
    assert held() == held() == [None, 300]
    assert len(quiet.wait(w.AskUsage)) == 1, "it owes that answer already"
    quiet.say(w.WorkerUsage(1, 200, 0, 0))
    assert held()[0] == 200
    quiet.wait(w.AskUsage, 2)


def test_in_emulated_time_nobody_is_asked(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake,) = desk.workers(good)
    monkeypatch.setattr(desk.engine.pace, "profile_name", "rtx3090-1gbe")
    assert reading._usage(desk.engine) == {}
    assert [node.memory_bytes for node in reading._peers(desk.engine.peers, {})] == [None]
    desk.settle()
    assert not fake.of(w.AskUsage)

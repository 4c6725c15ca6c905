"""Runs of several requests that are open at the same parts of a shadow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from checkpoint import kv
from checkpoint.coroutine import Coroutine
from shadow_node.cache import request_cache
from shadow_node.stages import node, remote, rows
from shadow_node.stages.division import Part
from shadow_node.stages.first import FirstStage
from shadow_node.stages.later import LaterStage
from shadow_node.stages.node import Stage
from wire.inprocess import connect
from wire.messages import CancelRun, Message

pytestmark = pytest.mark.slow
PROMPT = [5, 17, 3, 60, 41, 9]


def go_on(first: FirstStage, run: Coroutine[int], layer: int | None = None) -> None:
    """To the gate of a layer, or to its end."""
    output = None
    while (gate := run.resume(output)) is not None and gate.layer != layer:
        (output,) = first.experts_of([gate])


def test_a_pass_behind_a_long_prompt_loses_no_part(
    prompted: Any, later: LaterStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, cache, lost = prompted
    experts = later.experts.values()
    for one in experts:
        monkeypatch.setattr(one, "forward", partial(slow_prompt, one.forward))
    monkeypatch.setattr(remote, "SILENT_S", 0.5)
    monkeypatch.setattr(remote, "OWN_TIMES", 0.0)
    assert len(experts) * SLOW_S > 2 * remote.SILENT_S
    with torch.inference_mode():
        prompt, decode = first.lock_step(PROMPT, first.new_cache()), first.lock_step([7], cache)
        go_on(first, prompt, first.division.starts[1])
        go_on(first, decode)
        go_on(first, prompt)
    assert decode.ended
    assert prompt.ended
    assert not lost


SLOW_S = 0.35


def slow_prompt(forward: Callable[..., torch.Tensor], hidden: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
    if len(hidden) > 1:
        time.sleep(SLOW_S)
    return forward(hidden, *more)


def test_rows_of_two_runs_in_pieces_do_not_wait_for_each_other(
    demo_store: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, rooms = demo_store("float32"), (1, 1, 1)
    manifest = store.manifest
    stages = [
        Stage(f"part {n}", LaterStage(store, "fp16", part=Part(n, rooms)), manifest.model_digest, manifest.dtype)
        for n in (1, 2)
    ]
    first = FirstStage(store, "fp16", "cpu", Part(0, rooms), [partial(connect, stage) for stage in stages])
    first.reach()
    wanted = [first.forward(tokens, first.new_cache()) for tokens in (PROMPT, PROMPT[:5])]
    monkeypatch.setattr(rows, "PIECE_BYTES", 1)
    monkeypatch.setattr(node, "SILENT_S", 1.0)
    with torch.inference_mode():
        runs = [first.lock_step(tokens, first.new_cache()) for tokens in (PROMPT, PROMPT[:5])]
        outputs: list[Any] = [None, None]
        while not all(run.ended for run in runs):
            for number, run in enumerate(runs):
                if not run.ended and (gate := run.resume(outputs[number])) is not None:
                    (outputs[number],) = first.experts_of([gate])
    assert [run.result for run in runs] == wanted
    for stage in stages:
        stage.close()


def test_a_cancelled_run_whose_rows_are_not_taken_blocks_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, session = threading.Event(), stage.accept(Silent())
    monkeypatch.setattr(session._said, "wait_for", partial(note_wait, waits, session._said.wait_for))
    thread = threading.Thread(target=drop, args=(session,))
    thread.start()
    assert waits.wait(10)
    session.dispatch(CancelRun(1))
    thread.join(node.SILENT_S / 2)
    assert not thread.is_alive()


class Silent:
    def send(self, *messages: Message) -> None: ...

    def close(self) -> None: ...


def note_wait(waits: threading.Event, wait_for: Callable[..., bool], *args: Any) -> bool:
    waits.set()
    return wait_for(*args)


def drop(session: Any) -> None:
    with pytest.raises(node._Dropped):
        session._await_taken(1)


def test_rows_do_not_overtake_the_way_back(first_of: Any, later: LaterStage, monkeypatch: pytest.MonkeyPatch) -> None:
    first = first_of()
    first.reach()
    cache = first.new_cache()
    kept = request_cache(cache)
    first.forward(PROMPT, cache)
    mark = kept.mark()
    first.forward([7], cache)
    own = [
        tensor[:, :, :1] for layer in cache.here.layers[: first.division.stop] for tensor in (layer.keys, layer.values)
    ]
    made: list[str] = []
    held = threading.Event()
    monkeypatch.setattr(node, "kv", Noting(made))
    first_experts = later.experts[first.division.starts[1]]
    forward = first_experts.forward
    monkeypatch.setattr(first_experts, "forward", lambda *args: held.wait(10) and forward(*args))
    with torch.inference_mode():
        other = first.lock_step(PROMPT, first.new_cache())
        go_on(first, other, first.division.starts[1])
        kept.go_to(mark)
        kept.take_over(len(PROMPT) - 1, [*own, *own[:1] * len(first.stages[0].layout.axes)])
        held.set()
        go_on(first, other)
        first.forward([7], cache)
    assert made == ["go_to", "take_over"]
    kept.close()


class Noting:
    """`checkpoint.kv`, whose changes of a cache are noted."""

    def __init__(self, made: list[str]) -> None:
        self._made = made

    def __getattr__(self, name: str) -> Any:
        if name in ("go_to", "take_over"):
            self._made.append(name)
        return getattr(kv, name)

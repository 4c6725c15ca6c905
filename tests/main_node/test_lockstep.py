"""The order in which the passes of a step go on, and what becomes of one that waits too long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from checkpoint.linear_batch import batch_linear
from main_node.engine.layer import LayerWork
from main_node.lockstep import LockStep
from scheduler import types as t
from support.nodes.engine_world import WAIT_S, rows_of
from wire.lent_threads import LentThreads

pytestmark = pytest.mark.timeout(60)


class Engine:
    """What a step needs of an engine."""

    def __init__(self) -> None:
        self.lent = LentThreads()
        self.pace = self
        self.begun: list[list[int]] = []

    def begin_layer(self, requests: Iterable[int]) -> None:
        self.begun.append(list(requests))


class Job:
    """A pass of some layers; what it does is noted. `act`: called with each layer before it waits."""

    def __init__(self, request: int, layers: int, engine: Engine, notes: list[Any], act: Callable[[Any], Any]) -> None:
        self.request = request
        self.one = t.Pass(request, 0, 1, prefill=False)
        self.rounded = False
        self.error: BaseException | None = None
        self.rounded = False
        self._layers, self._engine, self._notes, self._act = layers, engine, notes, act

    def forward(self) -> None:
        for number in range(self._layers):
            rows = rows_of(self.request)
            layer = LayerWork(rows.hidden, rows.index, rows.weights, self._engine.lent)
            self._notes.append((self.request, number))
            self._act((self.request, number, layer))
            if not layer.wait(WAIT_S):
                raise TimeoutError

    def enter(self) -> None:
        pass

    def end(self, error: BaseException | None = None) -> None:
        self.error = error
        self._notes.append((self.request, "end"))


def test_first_done_first_resumed() -> None:
    """Whatever the order of their gates."""
    engine, notes = Engine(), []
    layers: dict[int, LayerWork] = {}

    def act(what: Any) -> None:
        request, number, layer = what
        layers[request] = layer
        if number == 0 and request == 3:  # the last gate of the first layer
            for one in (2, 3, 1):
                layers[one].finish()
        elif number == 1:
            layer.finish()

    jobs = [Job(request, 2, engine, notes, act) for request in (1, 2, 3)]
    with torch.inference_mode():
        LockStep(engine, jobs).run()  # type: ignore[arg-type]
    first = [(1, 0), (2, 0), (3, 0)]
    assert notes == [*first, (2, 1), (3, 1), (1, 1), (2, "end"), (3, "end"), (1, "end")]


def test_one_that_raises_leaves_the_others() -> None:
    engine, notes = Engine(), []

    def act(what: Any) -> None:
        request, number, layer = what
        if (request, number) == (2, 1):
            raise KeyError("its own")
        layer.finish()

    jobs = [Job(request, 3, engine, notes, act) for request in (1, 2, 3)]
    with torch.inference_mode():
        LockStep(engine, jobs).run()  # type: ignore[arg-type]
    assert [type(job.error) for job in jobs] == [type(None), KeyError, type(None)]
    assert (2, 2) not in notes
    assert {(1, 2), (3, 2)} <= set(notes)


def test_a_layer_that_never_ends_ends_its_own_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, notes = Engine(), []
    monkeypatch.setattr(LayerWork, "wait", lambda layer, within_s: layer._until(lambda: layer.done, 0.02))

    def act(what: Any) -> None:
        request, _, layer = what
        if request == 1:
            threading.Timer(0.005, layer.finish).start()

    jobs = [Job(request, 1, engine, notes, act) for request in (1, 2)]
    with torch.inference_mode():
        LockStep(engine, jobs).run()  # type: ignore[arg-type]
    assert (jobs[0].error, type(jobs[1].error)) == (None, TimeoutError)


def test_rows_of_a_batched_step_meet_at_each_linear_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers begin together, and each product has the rows of all passes that are left."""
    engine, notes = Engine(), []
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    batch_linear(model)
    counts: list[int] = []
    from checkpoint import linear_batch

    multiply = linear_batch.multiply
    monkeypatch.setattr("main_node.lockstep.multiply", lambda calls: counts.append(len(calls)) or multiply(calls))
    got: dict[tuple[int, int], torch.Tensor] = {}

    def act(what: Any) -> None:
        request, number, layer = what
        if (request, number) == (3, 1):
            raise KeyError("its own")
        got[request, number] = model(torch.full((1, request, 4), float(request + number)))
        layer.finish()

    jobs = [Job(request, 2, engine, notes, act) for request in (1, 2, 3)]
    with torch.inference_mode():
        LockStep(engine, jobs, batched=True).run()  # type: ignore[arg-type]
    assert counts == [3, 3, 2, 2]
    assert engine.begun == [[1, 2, 3], [1, 2]]
    for (request, number), output in got.items():
        with torch.inference_mode():
            torch.testing.assert_close(output, model(torch.full((1, request, 4), float(request + number))))

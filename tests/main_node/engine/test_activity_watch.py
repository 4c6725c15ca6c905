"""What somebody who watches is told, beside the scheduler's own books."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from main_node.activity import HIT, HOST, IN_TIME, LATE, MISSED, OUTCOMES
from main_node.engine import activity_watch
from main_node.engine.activity_watch import ActivityWatch
from main_node.totals import Totals
from scheduler import types as t
from scheduler.alignment import Alignment
from scheduler.core.groups import RoundRobin
from scheduler.core.machine import Core

LAYERS, EXPERTS, WORKERS = 3, 4, 4
P = 5


class World:
    """A core whose workers answer when told to, and a watch."""

    def __init__(self) -> None:
        self.core = Core(t.ModelShape(tuple(range(LAYERS)), EXPERTS, 2), RoundRobin(2), Alignment())
        self.watch = ActivityWatch(self.core)
        self.now = 0.0
        self.owed: list[t.Load | t.Compute] = []
        for number in range(WORKERS):
            self.post(t.WorkerJoined(number, 1))

    def post(self, event: t.Event) -> None:
        commands = self.core.handle(event, self.now)
        self.watch.on_handled(event, self.now, commands)
        self.owed += [one for one in commands if isinstance(one, t.Load | t.Compute)]
        slots = {(one.worker, one.slot) for one in commands if isinstance(one, t.Evict)}
        self.owed = [one for one in self.owed if (one.worker, one.slot) not in slots or one in commands]

    def answer(self, kind: type) -> None:
        """All loads, or all computations, that are owed."""
        for one in [one for one in self.owed if isinstance(one, kind)]:
            self.owed.remove(one)
            self.post(t.LoadEnded(one.load_id) if isinstance(one, t.Load) else t.ComputeEnded(one.call_id))

    def answer_all(self) -> None:
        while self.owed:
            self.answer(t.Load)
            self.answer(t.Compute)

    def begin(self) -> None:
        """Decoding of a request."""
        self.post(t.ShadowJoined())
        self.post(t.RequestOpened(1, P))
        self.post(t.TokenDecoded(1, 0))
        self.post(t.StepStarted((t.Pass(1, P, 1, False),)))

    def read(self, since: int | None = None) -> Any:
        return self.watch.read(since, self.now, Totals())


@pytest.fixture
def world() -> World:
    return World()


def test_predicted_and_loaded_predicted_and_not_loaded_and_not_predicted(world: World) -> None:
    start = world.read()
    world.begin()
    world.post(t.Predicted(1, P, 0, (0, 1)))
    world.answer(t.Load)
    for layer, chosen in enumerate(((0, 1), (2, 3), (1, 2))):
        world.post(t.GateFired(t.Visit(1, P, layer), tuple((expert, 1) for expert in chosen)))
        world.answer_all()
        if layer == 0:
            world.post(t.Predicted(1, P, 1, (2, 3)))
    found = world.read(start.count)
    assert [(one.layer, one.expert, one.outcome) for one in found.accesses] == [
        (0, 0, IN_TIME), (0, 1, IN_TIME), (1, 2, LATE), (1, 3, LATE), (2, 1, MISSED), (2, 2, MISSED),
    ]  # fmt: skip
    assert found.predictions == 2
    workers = [{one.worker for one in found.accesses if one.layer == layer} for layer in range(LAYERS)]
    assert workers[0] == workers[2] == set(range(WORKERS)) - workers[1], "groups take turns"
    assert world.read(found.count).accesses == ()


def test_time_of_loads_and_of_computations(world: World) -> None:
    world.read()
    world.begin()
    world.post(t.GateFired(t.Visit(1, P, 0), ((3, 1),)))
    world.now = 2.0
    world.answer(t.Load)
    world.now = 2.5
    world.answer(t.Compute)
    world.now = 9.0
    (busy,) = (one for one in world.read().workers if one.loads)
    assert (busy.load_s, busy.compute_s, busy.loads, busy.computations) == (2.0, 0.5, 1, 1)
    assert (busy.loading, busy.computing, busy.held) == (0, 0, 0)


def test_what_a_lost_worker_held_is_gone(world: World) -> None:
    world.read()
    world.begin()
    world.post(t.Predicted(1, P, 0, (0, 1)))
    world.answer(t.Load)
    worker = next(one.number for one in world.read().workers if one.held)
    world.owed.clear()
    world.post(t.WorkerLost(worker, "killed"))
    assert worker not in {one.number for one in world.read().workers}
    world.post(t.WorkerJoined(worker, 1))
    assert {one.number: one.load_s for one in world.read().workers}[worker] == 0.0


def test_nothing_is_collected_while_nobody_looks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.begin()
    world.post(t.GateFired(t.Visit(1, P, 0), ((3, 1),)))
    world.answer_all()
    assert world.watch._count == 0
    count = world.read().count
    monkeypatch.setattr(activity_watch.time, "monotonic", lambda: 1e12)
    world.post(t.GateFired(t.Visit(1, P, 1), ((3, 1),)))
    world.answer_all()
    assert (world.watch._count, world.watch._workers) == (count, {})


def test_another_main_nodes_number_gives_nothing(world: World) -> None:
    world.read()
    world.begin()
    world.post(t.GateFired(t.Visit(1, P, 0), ((3, 1),)))
    assert world.read(1 << 40).accesses == ()
    assert [one.outcome for one in world.read(0).accesses] == [MISSED]


@pytest.mark.parametrize(
    "system", ["lrfu-prefetch", *(pytest.param(name, marks=pytest.mark.slow) for name in ("od-moe", "smoe"))]
)
def test_hits_and_misses_are_the_reports(system: str, embedded: Any) -> None:
    """A real cluster: an expert is a hit, or loaded ahead and there, where the report has it as a hit."""
    cluster = embedded("float32", system=system, shadow="none", workers=2)
    cluster.activity(None)
    with cluster.generate([5, 17, 80, 33, 2, 61], 6, ignore_eos=True) as answer:
        steps = iter(answer)
        next(steps)
        begin = cluster.activity(None).count
        before = cluster.main.engine.totals()
        for _ in steps:
            pass
    after = cluster.main.engine.totals()
    outcomes = Counter(one.outcome for one in cluster.activity(begin).accesses)
    assert sum(outcomes.values()) == after.named - before.named
    assert outcomes[HIT] + outcomes[IN_TIME] == after.hits - before.hits
    assert outcomes[HOST] == after.host_computed - before.host_computed
    assert set(outcomes) <= set(range(len(OUTCOMES)))

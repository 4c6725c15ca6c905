"""What somebody who watches is told, beside the scheduler's own books."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from main_node.activity import HIT, HOST, IN_TIME, LATE, MISSED, OUTCOMES
from main_node.engine import activity_watch
from main_node.engine.activity_watch import ActivityWatch
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
        self.watch = ActivityWatch(self.core, lambda: self.left.append(True))
        self.left: list[bool] = []
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

    def step(self, index: int) -> None:
        """A token, of which nothing was predicted."""
        self.post(t.TokenDecoded(1, index))
        self.post(t.StepStarted((t.Pass(1, P + index, 1, False),)))
        for layer in range(LAYERS):
            self.post(t.GateFired(t.Visit(1, P + index, layer), ((0, 1), (3, 1))))
            self.answer_all()


@pytest.fixture
def world() -> World:
    return World()


def test_predicted_and_loaded_predicted_and_not_loaded_and_not_predicted(world: World) -> None:
    world.watch.read(None)
    world.begin()
    world.post(t.Predicted(1, P, 0, (0, 1)))
    world.answer(t.Load)
    for layer, chosen in enumerate(((0, 1), (2, 3), (1, 2))):
        world.post(t.GateFired(t.Visit(1, P, layer), tuple((expert, 1) for expert in chosen)))
        world.answer_all()
        if layer == 0:
            world.post(t.Predicted(1, P, 1, (2, 3)))
    found = world.watch.read(0)
    assert sorted((one.layer, one.expert, one.outcome) for one in found) == [
        (0, 0, IN_TIME), (0, 1, IN_TIME), (1, 2, LATE), (1, 3, LATE), (2, 1, MISSED), (2, 2, MISSED),
    ]  # fmt: skip
    assert world.watch.predictions == 2
    workers = [{one.worker for one in found if one.layer == layer} for layer in range(LAYERS)]
    assert workers[0] == workers[2] == set(range(WORKERS)) - workers[1], "groups take turns"
    assert world.watch.read(world.watch.count) == ()


def test_it_leaves_when_nobody_looks_any_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.watch.read(None)
    world.begin()
    monkeypatch.setattr(activity_watch.runtime, "monotonic", lambda: 1e12)
    world.step(1)
    assert world.watch.count == 0
    assert world.left


def test_nothing_is_collected_before_somebody_looks(embedded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def handled(*given: Any) -> None:
        raise AssertionError(given)

    cluster = embedded("float32", shadow="none", workers=2)
    monkeypatch.setattr(activity_watch.ActivityWatch, "on_handled", handled)
    with cluster.generate([5, 17], 2, ignore_eos=True) as answer:
        assert len(list(answer)) == 3


def test_another_main_nodes_number_gives_nothing(world: World) -> None:
    world.watch.read(None)
    world.begin()
    world.post(t.GateFired(t.Visit(1, P, 0), ((3, 1),)))
    assert world.watch.read(1 << 40) == ()
    assert [one.outcome for one in world.watch.read(0)] == [MISSED]


def test_a_fast_cluster_is_followed_in_some_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,000 steps within a second, about as many as the bound allows, each as a whole."""
    now = 100.0
    monkeypatch.setattr(activity_watch.runtime, "monotonic", lambda: now)
    world.watch.read(None)
    world.begin()
    for index in range(1, 1000):
        world.step(index)
        now += 0.001
    of_a_step = LAYERS * 2
    assert world.watch.count % of_a_step == 0
    assert world.watch.count == pytest.approx(activity_watch.ACCESSES_S, rel=0.2)


@pytest.mark.parametrize(
    "system", ["lrfu-prefetch", *(pytest.param(name, marks=pytest.mark.slow) for name in ("od-moe", "smoe"))]
)
def test_hits_and_misses_are_the_reports(system: str, embedded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real cluster: an expert is a hit, or loaded ahead and there, where the report has it as a hit."""
    monkeypatch.setattr(activity_watch, "ACCESSES_S", 1e9)
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

"""The same loads and evictions on the emulated worker and in the simulator: each load ends at the same moment, to the
digit."""

from __future__ import annotations

import threading
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from odmoe.clusters.timed_streams import TimedNode
from scheduler import types as t
from scheduler.emulation.clock import Cancellation, Emulation
from scheduler.simulation.events import EventHeap
from scheduler.simulation.workers import SimulatedWorkers
from scheduler.timing.links import MainLinks
from scheduler.timing.profile import Profile, find_profile
from support.nodes.worker_desk import WorkerDesk
from wire.messages import Evict, Load, Loaded, Stamped, WorkerReady
from worker_node.loaders.emulated import EmulatedLoader
from worker_node.loaders.memory import MemoryLoader

PROFILE = find_profile("rtx3090-1gbe")
WAIT_S = 5.0
START = 100.0
SLOTS = 2

Steps = list[tuple[float, int]]
"""(moment, slot): an empty slot is loaded, another one evicted."""


def commands(steps: Steps) -> list[tuple[float, t.Load | t.Evict]]:
    taken: dict[int, t.ExpertId] = {}
    found: list[tuple[float, t.Load | t.Evict]] = []
    for number, (at, slot) in enumerate(steps, 1):
        if slot in taken:
            found.append((at, t.Evict(0, slot, taken.pop(slot))))
        else:
            taken[slot] = t.ExpertId(number % 2, number % 4)
            found.append((at, t.Load(0, slot, taken[slot], number)))
    return found


def simulated(profile: Profile, steps: Steps) -> dict[int, float]:
    """Load -> the moment at which it ended."""
    events, found = EventHeap(), {}

    def post(event: t.Event) -> None:
        if isinstance(event, t.LoadEnded):
            found[event.load_id] = events.now

    workers = SimulatedWorkers(events, profile, MainLinks(profile), post, lambda call: None, lambda: None, None)
    workers.join(SLOTS, ())
    for at, command in commands(steps):
        events.at(at, workers.load if isinstance(command, t.Load) else workers.evict, command)
    events.run()
    return found


class Reply:
    """The worker's answers, with their times."""

    def __init__(self) -> None:
        self.came: SimpleQueue[Stamped] = SimpleQueue()

    def send(self, *messages: Stamped) -> None:
        for message in messages:
            self.came.put(message)

    def close(self) -> None:
        pass


def emulated(desk: WorkerDesk, profile: Profile, steps: Steps, ends: dict[int, float]) -> dict[int, float]:
    """By a clock that stands still but for commands and expected ends: the worker's thread has until then to end."""
    clock = [START]
    emulation = Emulation(replace(profile, load_s=0.0), lambda: clock[0])
    worker = desk.worker(slots=SLOTS, loader=EmulatedLoader(MemoryLoader(desk.store), emulation))
    emulation.profile = profile  # the worker has been measured
    reply: Any = Reply()
    session = TimedNode(worker, emulation).accept(reply)
    session.on_message(desk.hello())
    assert isinstance(reply.came.get(timeout=WAIT_S).message, WorkerReady)
    found: dict[int, float] = {}
    ended = [(at, number, None) for number, at in ends.items()]
    for at, _, command in sorted(ended + [(at, 0, c) for at, c in commands(steps)], key=lambda step: step[:2]):
        clock[0] = max(clock[0], at)
        emulation.adopt(at)
        if isinstance(command, t.Load):
            session.on_message(Load(command.load_id, command.slot, *command.expert))
        elif isinstance(command, t.Evict):
            session.on_message(Evict(command.slot))
        else:
            answer = reply.came.get(timeout=WAIT_S)
            assert isinstance(answer.message, Loaded)
            found[answer.message.load_id] = answer.due
    worker.close()
    assert reply.came.empty()
    return found


moments = st.lists(
    st.tuples(st.integers(1, 40_000).map(lambda us: us / 1e6), st.integers(0, SLOTS - 1)), min_size=1, max_size=12
)


def at_moments(gaps: Steps) -> Steps:
    at, steps = START, []
    for gap, slot in gaps:
        at += gap
        steps.append((at, slot))
    return steps


def check_agree(desk: WorkerDesk, monkeypatch: pytest.MonkeyPatch, profile: Profile, gaps: Steps) -> None:
    """The simulator and the worker end the same loads at the same times."""
    # The clock moves by itself here: a sleeping thread looks at it now and then.
    monkeypatch.setattr(Cancellation, "wait", lambda cancelled, timeout: threading.Event.wait(cancelled, 0.0005))
    steps = at_moments(gaps)
    ends = simulated(profile, steps)
    assert emulated(desk, profile, steps, ends) == ends


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(gaps=moments, piece=st.sampled_from([0.0, 0.000298, 0.004, 0.025]))
@example(gaps=[(0.001, 0), (0.001, 0), (0.0001, 1)], piece=0.004)
def test_simulator_and_worker_agree(
    desk: WorkerDesk, monkeypatch: pytest.MonkeyPatch, gaps: Steps, piece: float
) -> None:
    check_agree(desk, monkeypatch, replace(PROFILE, load_piece_s=piece), gaps)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(gaps=moments)
@example(gaps=[(0.001, 0), (0.001, 0), (0.0001, 1)])
def test_they_agree_where_no_load_can_be_given_up(
    desk: WorkerDesk, monkeypatch: pytest.MonkeyPatch, gaps: Steps
) -> None:
    check_agree(desk, monkeypatch, replace(PROFILE, cancellable=False), gaps)


@pytest.mark.parametrize(("again", "begins_after"), [(0, (0.025, 0.050)), (1, (0.025, 0.050))])
def test_a_load_that_cannot_be_given_up_keeps_link_and_slot(again: int, begins_after: tuple[float, float]) -> None:
    """Of 25 ms, and evicted after 1: the next one begins at its end, in the same slot or in the other."""
    profile = replace(PROFILE, cancellable=False)
    first, second = START + 0.001, START + 0.002
    steps = [(START, 0), (first, 0), (first, again), (second, 1 - again)]
    ends = simulated(profile, steps)
    assert list(ends.values()) == pytest.approx([START + begins + 0.025 for begins in begins_after])


def test_a_load_that_waits_for_the_link_can_be_given_up_all_the_same() -> None:
    profile = replace(PROFILE, cancellable=False)
    steps = [(START, 0), (START + 0.001, 1), (START + 0.002, 1), (START + 0.003, 1)]
    assert list(simulated(profile, steps).values()) == pytest.approx([START + 0.025, START + 0.050])


@pytest.mark.parametrize(
    ("piece", "evicted_after", "begins_after"),
    [
        (0.0, 0.0101, 0.0101),
        (0.004, 0.0101, 0.012),
        (0.004, 0.0119, 0.012),
        (0.004, 0.012, 0.012),
        (0.004, 0.0, 0.0),
        (0.004, 0.0249, 0.025),  # the last piece is a short one
        (0.025, 0.001, 0.025),
        (0.3, 0.001, 0.025),  # a smaller expert than a piece
    ],
)
def test_the_next_load_begins_with_the_end_of_a_piece(piece: float, evicted_after: float, begins_after: float) -> None:
    profile = replace(PROFILE, load_piece_s=piece)
    steps = [(START, 0), (START + evicted_after, 0), (START + evicted_after, 1)]
    (end,) = simulated(profile, steps).values()
    assert end == pytest.approx(START + begins_after + profile.load_s)

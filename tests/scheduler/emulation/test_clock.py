"""Emulated time on a clock of the test's own: the profile's arithmetic, whatever sleeping and working cost."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from main_node.engine.pace import MainPace
from scheduler import types as t
from scheduler.emulation.clock import CREDIT_S, Cancellation, Emulation, SerialResource
from scheduler.timing.profile import find_profile
from shadow_node.pace import ShadowPace

WAIT_S = 20.0
PROFILE = find_profile("rtx3090-1gbe")
ms = st.integers(0, 30_000).map(lambda us: us / 1e6)
small = st.integers(0, 4_000).map(lambda us: us / 1e6)


class World:
    """A clock that moves when someone works or sleeps; a sleep takes what it should and `overshoot` more."""

    def __init__(self) -> None:
        self.time = 100.0
        self.overshoot = 0.0
        self.emulation = Emulation(PROFILE, lambda: self.time)

    def work(self, seconds: float) -> None:
        self.time += seconds

    def noted(self) -> threading.Event:
        """Set once something more has been put down on the agenda."""
        agenda = self.emulation.agenda
        put, at = threading.Event(), agenda.at

        def note(*said: Any, **more: Any) -> None:
            at(*said, **more)
            put.set()

        agenda.at = note  # type: ignore[method-assign]
        return put

    def until(self, moment: float) -> None:
        """The clock says so, and all that is due on the agenda has been done."""
        self.time = moment
        self.emulation.agenda.wait(-1e9, lambda: None)
        self.emulation.agenda.wait(moment, lambda: None)


class Sleep(Cancellation):
    """Whoever waits for it moves the clock; after so many seconds of waiting it is given up."""

    def __init__(self, world: World, after: float = 1e9) -> None:
        super().__init__()
        self.world = world
        self.after = after

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        assert timeout > 0, "nothing to sleep for"
        if timeout >= self.after:
            self.world.time += self.after
            self.cancel(self.world.time)
            self.world.time += self.world.overshoot
            return True
        self.after -= timeout
        self.world.time += timeout + self.world.overshoot
        return False


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.emulation.close()


def test_a_report_says_what_it_is(world: World) -> None:
    assert world.emulation.label == "emulated: rtx3090-1gbe"


# --- lanes ------------------------------------------------------------------------------------------------------------


@given(steps=st.lists(st.tuples(ms, small, small), min_size=1, max_size=60))
def test_the_errors_of_sleeps_do_not_add_up(steps: list[tuple[float, float, float]]) -> None:
    """(should last, does work for, wakes late by): the sum is the plain one; nothing ends before its time."""
    world, due = World(), 100.0
    lane = SerialResource(world.emulation)
    for least, work, overshoot in steps:
        world.overshoot = overshoot
        start = lane.begin(world.emulation.now())
        behind = world.time - start
        world.work(work)
        ended = lane.wait(least, Sleep(world))
        if behind + work + overshoot > CREDIT_S:
            return  # the machine is too slow from here on: see the next test
        due += least
        assert ended == pytest.approx(due)
        assert world.time >= due - 1e-9
        assert world.time <= due + CREDIT_S + 1e-9


@given(late=st.integers(0, 500).map(lambda n: n / 1e3), least=ms)
def test_what_is_late_by_more_than_the_credit_is_lost(late: float, least: float) -> None:
    """After a stop of the whole machine the emulation does not run on at full speed until it has caught up."""
    world = World()
    lane = SerialResource(world.emulation)
    lane.begin(world.time)
    lane.wait(0.001, Sleep(world))
    world.work(late)
    before = world.time
    lane.begin(world.emulation.now())
    lane.wait(least, Sleep(world))
    assert world.time - before >= least - CREDIT_S - 1e-9
    if late <= CREDIT_S:
        assert world.time == pytest.approx(max(before, 100.001 + least))


@given(jobs=st.lists(st.tuples(small, small, st.booleans()), max_size=20))
def test_a_lane_does_one_thing_after_the_other(jobs: list[tuple[float, float, bool]]) -> None:
    """(there so long after the one before, lasts, is waited for): as in a queue with one server."""
    world, at = World(), 100.0
    lane, arrivals, lasting, ends = SerialResource(world.emulation), [], [], []
    for gap, lasts, waits in jobs:
        at += gap
        world.time = max(world.time, at)
        if world.time - at > CREDIT_S / 2:
            return
        arrivals.append(at)
        lasting.append(lasts)
        lane.begin(at)
        ends.append(lane.wait(lasts, Sleep(world)) if waits else lane.end(lasts))
    # each ends when the longest chain of those before it does
    for n in range(len(ends)):
        chains = [arrivals[first] + sum(lasting[first : n + 1]) for first in range(n + 1)]
        assert ends[n] == pytest.approx(max(chains))


def test_a_computation_is_done_at_once_and_counts_as_ended_later(world: World) -> None:
    lane = SerialResource(world.emulation)
    for number in range(1, 6):
        lane.begin(100.0)
        world.work(0.001)
        assert lane.end(0.020) == pytest.approx(100 + 0.020 * number)
        assert world.emulation.now() == pytest.approx(100 + 0.020 * number), "what is sent now is stamped with that"
        assert world.time == pytest.approx(100 + 0.001 * number), "nobody has slept"


@given(lasts=ms, after=ms, overshoot=small)
def test_what_is_cancelled_frees_its_lane_as_of_then(lasts: float, after: float, overshoot: float) -> None:
    """However late its thread notices; and what has ended before ends when it should."""
    world = World()
    world.overshoot = overshoot
    lane = SerialResource(world.emulation)
    assert lane.begin(100.0) == 100.0
    ended = lane.wait(lasts, Sleep(world, after))
    assert ended == pytest.approx(min(100 + after, 100 + lasts))
    assert lane.begin(100.0) == pytest.approx(ended)
    assert lane.begin(ended + 0.001) == pytest.approx(ended + 0.001)


@pytest.mark.parametrize(("at", "ended"), [(99.9, 100.02), (100.03, 100.03), (100.06, 100.05)])
def test_cancelled_as_of_another_moment(at: float, ended: float) -> None:
    """Not before it began, nor after it would have ended."""
    world = World()
    world.time = 100.04
    lane, cancelled = SerialResource(world.emulation), Cancellation()
    assert lane.begin(100.02) == 100.02
    cancelled.cancel(at)
    assert lane.wait(0.03, cancelled) == pytest.approx(ended)


def test_a_wait_that_is_cancelled_ends_at_once(world: World) -> None:
    """An hour's, by a clock that stands still."""
    cancelled, found = Cancellation(), []

    def wait() -> None:
        world.emulation.wait_until(world.time + 3600, cancelled)
        found.append(world.emulation.now())

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    cancelled.cancel(world.time)
    thread.join(WAIT_S)
    assert found == [world.time]


def test_real_waits_never_end_early() -> None:
    """By the real clock, and however late the machine is."""
    emulation, never = Emulation(replace(PROFILE, load_s=0.003)), Cancellation()
    lane, start = SerialResource(emulation), time.monotonic()
    end = lane.begin(start)
    for n in range(1, 11):
        lane.begin(end)
        end = lane.wait(emulation.profile.load_s, never)
        assert time.monotonic() >= end >= start + n * 0.003 - 1e-9


def test_only_what_is_late_by_more_than_the_credit_counts_as_lost(world: World) -> None:
    lane, other = SerialResource(world.emulation), SerialResource(world.emulation)
    lane.begin(100.0)
    world.work(0.010 + CREDIT_S)
    lane.end(0.010)
    assert world.emulation.lost_s == pytest.approx(0), "just covered"
    world.work(0.5)
    lane.begin(100.010)
    assert world.emulation.lost_s == pytest.approx(0.5)
    other.begin(100.110)
    assert world.emulation.lost_s == pytest.approx(0.5), "the same time was lost on another place"
    lane.wait(0.010, Sleep(world))
    assert world.emulation.lost_s == pytest.approx(0.5)
    world.overshoot = 0.3
    lane.begin(world.time)
    lane.wait(0.010, Sleep(world))
    assert world.emulation.lost_s == pytest.approx(0.6), "it woke up so late"


def test_a_thread_has_a_time_of_its_own(world: World) -> None:
    world.emulation.adopt(world.time - 0.01)
    seen: list[float] = []
    thread = threading.Thread(target=lambda: seen.append(world.emulation.now()))
    thread.start()
    thread.join(WAIT_S)
    assert seen == [100.0]
    assert world.emulation.now() == pytest.approx(99.99)
    world.emulation.adopt(500.0)
    assert world.emulation.now() == 500.0, "it has done early what counts later"
    world.time = 501.0
    assert world.emulation.now() == pytest.approx(501 - CREDIT_S), "and is never far behind"


# --- the main node ----------------------------------------------------------------------------------------------------


def begin(pace: MainPace, tokens: int, request: int = 1) -> None:
    pace.begin_step((t.Pass(request, 0, tokens, prefill=True),), batched=False)


@settings(deadline=None)
@given(layers=st.lists(st.tuples(small, small), min_size=1, max_size=30), tokens=st.integers(1, 40))
def test_a_main_layer_lasts_from_the_last_answer_to_the_gate(layers: list[tuple[float, float]], tokens: int) -> None:
    """(the layer's own work, what its experts take): the profile's time of a layer, whatever was computed meanwhile."""
    world = World()
    pace, due = MainPace(world.emulation), 100.0
    begin(pace, tokens)
    layer_s = PROFILE.main_layer_s + (tokens - 1) * PROFILE.main_extra_s
    for work, experts in layers:
        due += layer_s
        world.time = max(world.time, due) + min(work, 0.0005)
        if world.time - due > CREDIT_S / 2:
            break
        assert pace.gate(1, world.emulation.now) == pytest.approx(due), "those who are told of it hear this"
        due += experts
        world.time = max(world.time, due)
        for at in (due - experts / 2, due, due - experts / 3):  # answers: the last is not the latest
            world.emulation.adopt(at)
            pace.on_answered(1)
        pace.on_resumed(1)
        assert world.emulation.now() == pytest.approx(due)
    world.emulation.close()


@pytest.mark.parametrize(("attended", "known"), [(False, 0.0), (True, 0.003 + PROFILE.main_layer_s)])
def test_what_is_foreseen_is_known_with_the_gate_or_a_layer_after_the_answers(
    world: World, attended: bool, known: float
) -> None:
    """Though by the clock it was computed later, on a thread that has not told the gate itself."""
    pace, gate = MainPace(world.emulation), 100 + PROFILE.main_layer_s
    begin(pace, 1)
    world.time = gate
    pace.gate(1, lambda: None)
    world.work(0.004)
    assert world.emulation.now() == pytest.approx(gate), "what is said now is stamped with that"
    for at in (gate + 0.003, gate + 0.001):
        world.emulation.adopt(at)
        pace.on_answered(1)
    told: list[float] = []
    pace.on_foreseen(1, lambda: told.append(world.emulation.now()), attended)
    world.until(gate + known - 1e-6)
    assert told == [] or not attended
    world.until(gate + known + 1e-6)
    assert told == [pytest.approx(gate + known)]


def test_what_is_foreseen_is_told_before_the_next_gate(world: World) -> None:
    """At the same moment: the answers that let the layer end are those that it was computed from."""
    pace, told = MainPace(world.emulation), []
    begin(pace, 1)
    world.time = 101.0
    pace.gate(1, lambda: told.append("gate"))
    world.emulation.adopt(101.0)
    pace.on_answered(1)
    pace.on_foreseen(1, lambda: told.append("foreseen"), attended=True)
    pace.on_resumed(1)
    world.time = 102.0
    pace.gate(1, lambda: told.append("gate"))
    assert told == ["gate", "foreseen", "gate"]


def test_a_gate_is_not_told_before_its_time(world: World) -> None:
    pace, told, put = MainPace(world.emulation), [], world.noted()
    begin(pace, 1)
    thread = threading.Thread(target=lambda: told.append(pace.gate(1, lambda: world.time)))
    thread.start()
    assert put.wait(WAIT_S)
    for part in (0.0, 0.3, 0.9, 0.999):
        world.until(100 + part * PROFILE.main_layer_s)
        assert told == []
    world.until(100 + PROFILE.main_layer_s)
    thread.join(WAIT_S)
    assert told == [100 + PROFILE.main_layer_s]


def test_a_gate_raises_what_is_raised_where_it_is_told(world: World) -> None:
    pace = MainPace(world.emulation)
    begin(pace, 1)
    world.work(1.0)

    def closed() -> None:
        raise KeyError("the request was closed")

    with pytest.raises(KeyError, match="was closed"):
        pace.gate(1, closed)


def test_a_pass_after_a_pause_starts_when_it_starts(world: World) -> None:
    pace = MainPace(world.emulation)
    layer_s = PROFILE.main_layer_s
    begin(pace, 1)
    world.work(layer_s)
    pace.gate(1, lambda: None)
    world.emulation.adopt(100 + layer_s)
    pace.on_answered(1)
    world.work(5.0)
    pace.on_decoded(1)
    assert world.emulation.now() == pytest.approx(105 + layer_s)
    world.work(0.3)  # telling the shadow is the machine's affair: the pass begins when its token was there
    begin(pace, 1)
    assert world.emulation.now() == pytest.approx(105 + layer_s + 0.3 - CREDIT_S)
    world.time -= 0.3
    world.work(layer_s)
    assert pace.gate(1, world.emulation.now) == pytest.approx(105 + 2 * layer_s)


@pytest.mark.parametrize(("paused_s", "lost_s"), [(0.0, 5.0), (4.9, 0.1), (0.15, 4.85)])
def test_the_clients_time_between_passes_is_not_the_machines(world: World, paused_s: float, lost_s: float) -> None:
    pace = MainPace(world.emulation)
    begin(pace, 1)
    world.work(5.0)
    pace.on_paused(1, paused_s)
    pace.on_decoded(1)
    assert pace.lost_s == pytest.approx(lost_s)
    pace.on_decoded(1)
    assert pace.lost_s == pytest.approx(lost_s), "the next pass begins in time"


def test_a_gate_and_an_answer_that_are_late_count_as_lost(world: World) -> None:
    pace = MainPace(world.emulation)
    begin(pace, 1)
    world.work(PROFILE.main_layer_s + CREDIT_S + 1.0)
    pace.gate(1, lambda: None)
    assert pace.lost_s == pytest.approx(1.0)
    world.emulation.adopt(world.time)
    world.work(CREDIT_S + 2.0)
    pace.on_answered(1)
    assert pace.lost_s == pytest.approx(3.0)


def test_a_pass_right_after_another_goes_on_from_its_last_answer(world: World) -> None:
    pace = MainPace(world.emulation)
    begin(pace, 1)
    world.emulation.adopt(100.02)
    pace.on_answered(1)
    world.time = 100.05  # sampling, and a machine that is late
    pace.on_decoded(1)
    begin(pace, 1)
    assert world.emulation.now() == pytest.approx(100.02)
    begin(pace, 1, request=2)
    assert world.emulation.now() == pytest.approx(100.05), "another request's does not"


@pytest.mark.parametrize("who", list(itertools.permutations(["gate", "prediction", "answer"])), ids="-".join)
@pytest.mark.parametrize("apart", [-0.001, 0.001])
def test_gate_and_prediction_are_taken_in_the_order_of_their_times(
    world: World, who: tuple[str, ...], apart: float
) -> None:
    """A millisecond apart, whoever comes to the agenda first, though the machine looks up long after both."""
    pace, heard = MainPace(world.emulation), []
    begin(pace, 1)
    gate = 100 + PROFILE.main_layer_s
    dues = {"gate": gate, "prediction": gate + apart, "answer": gate + 2 * apart}
    threads = []
    for name in who:
        if name == "gate":
            put = world.noted()
            thread = threading.Thread(
                target=lambda: pace.gate(1, lambda: heard.append(("gate", world.emulation.now())))
            )
            thread.start()
            threads.append(thread)
            assert put.wait(WAIT_S)
        else:
            act = lambda name=name: heard.append((name, world.emulation.now()))  # noqa: E731
            world.emulation.agenda.at(dues[name], act)
    assert heard == []
    world.until(gate + 0.02)
    for thread in threads:
        thread.join(WAIT_S)
    assert heard == sorted(dues.items(), key=lambda item: item[1])


# --- the shadow -------------------------------------------------------------------------------------------------------


def test_a_shadows_pass_starts_when_its_alignment_has_come(world: World) -> None:
    layer_s = PROFILE.shadow_layer_s
    pace = ShadowPace(world.emulation)
    came = pace.now()
    world.work(0.004)  # its thread takes it so much later
    pace.take(came)
    for layer in range(1, 9):
        world.work(layer_s / 2)
        pace.layer(1, math.inf)
        assert world.emulation.now() == pytest.approx(100 + layer_s * layer)
    pace.take(came)  # was allowed before the last pass had ended
    pace.layer(1, math.inf)
    assert world.emulation.now() == pytest.approx(100 + 9 * layer_s)
    world.work(1.0)
    world.emulation.adopt(world.time)
    came = pace.now()
    pace.take(came)
    pace.layer(1, math.inf)
    assert world.emulation.now() == pytest.approx(came + layer_s)


def test_a_shadows_layer_is_waited_for_where_a_message_may_change_the_next(world: World) -> None:
    pace = ShadowPace(world.emulation)
    pace._never = Sleep(world)
    extra_s = PROFILE.shadow_s(3) - PROFILE.shadow_s(1)
    pace.take(pace.now())
    pace.layer(1, 100.0)
    assert world.time == pytest.approx(100 + PROFILE.shadow_layer_s)
    pace.layer(3, 100.0)
    assert world.time == pytest.approx(100 + 2 * PROFILE.shadow_layer_s + extra_s)
    assert extra_s > 0

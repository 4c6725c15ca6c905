"""Emulated time on a clock of the test's own: the profile's arithmetic, whatever sleeping and working cost."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.emulation import CREDIT_S, Emulation, Lane, MainPace, ShadowPace
from scheduler.profile import find_profile

PROFILE = find_profile("rtx3090-1gbe")
ms = st.integers(0, 30_000).map(lambda us: us / 1e6)
small = st.integers(0, 4_000).map(lambda us: us / 1e6)


class World:
    """A clock that moves when someone works or sleeps; a sleep takes what it should and `overshoot` more."""

    def __init__(self) -> None:
        self.time = 100.0
        self.overshoot = 0.0
        self.slept: list[float] = []
        self.emulation = Emulation(PROFILE, lambda: self.time, self.sleep)

    def sleep(self, seconds: float) -> None:
        assert seconds > 0, "nothing to sleep for"
        self.slept.append(seconds)
        self.time += seconds + self.overshoot

    def work(self, seconds: float) -> None:
        self.time += seconds


def test_a_report_says_what_it_is() -> None:
    assert World().emulation.label == "emulated: rtx3090-1gbe"


@given(steps=st.lists(st.tuples(ms, small, small), min_size=1, max_size=60))
def test_the_errors_of_sleeps_do_not_add_up(steps: list[tuple[float, float, float]]) -> None:
    """(should last, does work for, wakes late by): the sum is the plain one; nothing ends before its time."""
    world, due = World(), 100.0
    lane = Lane(world.emulation)
    for least, work, overshoot in steps:
        world.overshoot = overshoot
        start = lane.begin(world.emulation.now())
        behind = world.time - start
        world.work(work)
        ended = lane.end(least)
        if behind + work + overshoot > CREDIT_S:
            return  # the machine is too slow from here on: see the next test
        due += least
        assert ended == pytest.approx(due)
        assert due - 1e-9 <= world.time <= due + CREDIT_S + 1e-9


@given(late=st.integers(0, 500).map(lambda n: n / 1e3), least=ms)
def test_what_is_late_by_more_than_the_credit_is_lost(late: float, least: float) -> None:
    """After a stop of the whole machine the emulation does not run on at full speed until it has caught up."""
    world = World()
    lane = Lane(world.emulation)
    lane.begin(world.time)
    lane.end(0.001)
    world.work(late)
    before = world.time
    lane.begin(world.emulation.now())
    lane.end(least)
    assert world.time - before >= least - CREDIT_S - 1e-9
    if late <= CREDIT_S:
        assert world.time == pytest.approx(max(before, 100.001 + least))


@given(jobs=st.lists(st.tuples(small, small), max_size=20))
def test_a_lane_does_one_thing_after_the_other(jobs: list[tuple[float, float]]) -> None:
    """(there so long after the one before, lasts): as in a queue with one server."""
    world, free, at = World(), 0.0, 100.0
    lane = Lane(world.emulation)
    for gap, least in jobs:
        at += gap
        world.time = max(world.time, at)
        start = lane.begin(at)
        if world.time - at > CREDIT_S / 2:
            return
        assert start == pytest.approx(max(at, free))
        free = lane.end(least)
        assert free == pytest.approx(start + least)


def test_a_thread_has_a_time_of_its_own() -> None:
    world = World()
    world.emulation.adopt(world.time - 0.01)
    seen: list[float] = []
    thread = threading.Thread(target=lambda: seen.append(world.emulation.now()))
    thread.start()
    thread.join(20)
    assert seen == [100.0]
    assert world.emulation.now() == pytest.approx(99.99)
    world.emulation.adopt(500.0)
    assert world.emulation.now() == 100.0, "nothing is to come yet"


def test_a_wait_that_is_given_up_ends_at_once() -> None:
    emulation, given_up, found = Emulation(PROFILE), threading.Event(), []
    due = time.monotonic() + 3600
    thread = threading.Thread(target=lambda: found.append(emulation.wait_until(due, given_up)), daemon=True)
    thread.start()
    given_up.set()
    thread.join(20)
    assert found == [False]


def test_what_was_given_up_frees_its_lane() -> None:
    emulation, given_up = Emulation(PROFILE), threading.Event()
    lane = Lane(emulation)
    start = lane.begin(emulation.now())
    given_up.set()
    ended = lane.end(3600, given_up)
    assert start <= ended <= time.monotonic()
    assert lane.begin(emulation.now()) <= time.monotonic()


def test_real_sleeps_never_end_early() -> None:
    emulation = Emulation(replace(PROFILE, load_s=0.003))
    lane, start = Lane(emulation), time.monotonic()
    lane.begin(start)
    for n in range(1, 11):
        lane.begin(lane.end(emulation.profile.load_s))
        assert time.monotonic() >= start + n * 0.003


@given(layers=st.lists(st.tuples(small, small), min_size=1, max_size=30))
def test_main_layer_lasts_from_the_last_answer_to_the_gate(layers: list[tuple[float, float]]) -> None:
    """(the layer's own work, what its experts take): 3.6 ms of a layer, whatever was computed meanwhile."""
    world = World()
    world.overshoot = 0.0001
    pace, due = MainPace(world.emulation), 100.0
    pace.begin_pass()
    for work, experts in layers:
        world.work(min(work, 0.0035))
        pace.gate()
        due += 0.0036
        assert world.emulation.now() == pytest.approx(due)
        world.emulation.wait_until(due + experts)
        due += experts
        pace.answered()
        world.emulation.adopt(due - experts / 2)  # an answer that came later, but was there before
        pace.answered()
        pace.resumed()
        assert world.emulation.now() == pytest.approx(due)
    assert world.time - due <= CREDIT_S


def test_a_pass_after_a_pause_starts_when_it_starts() -> None:
    world = World()
    pace = MainPace(world.emulation)
    pace.begin_pass()
    pace.gate()
    pace.answered()
    world.work(5.0)
    pace.begin_pass()
    assert world.emulation.now() == pytest.approx(105.0036)
    pace.gate()
    assert world.time == pytest.approx(105.0072)


def test_a_shadows_pass_starts_when_its_alignment_has_come() -> None:
    world = World()
    pace = ShadowPace(world.emulation)
    pace.arrived()
    world.work(0.004)  # it is told to its thread so much later
    pace.begin_pass()
    for layer in range(1, 9):
        world.work(0.0015)
        pace.layer()
        assert world.emulation.now() == pytest.approx(100 + 0.002 * layer)
    world.work(0.01)
    pace.begin_pass()  # was allowed before the last one had ended
    pace.layer()
    assert world.emulation.now() == pytest.approx(100.018)
    world.work(1.0)
    pace.arrived()
    arrived = world.emulation.now()
    pace.begin_pass()
    pace.layer()
    assert world.emulation.now() == pytest.approx(arrived + 0.002)

"""Acts at their moments, on a clock of the test's own where nothing else is said: against a sorted list."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.emulation import agenda as module
from scheduler.emulation.agenda import Agenda
from scheduler.errors import DeadlineError

WAIT_S = 20.0
moments = st.integers(0, 12).map(float)


class World:
    """A clock that stands still until it is moved, and what has been done: (what, as of, on which thread)."""

    def __init__(self) -> None:
        self.time = 0.0
        self.done: list[tuple[Any, float, threading.Thread]] = []
        self.as_of = threading.local()
        self.agenda = Agenda(lambda: self.time, self.adopt)

    def adopt(self, at: float) -> None:
        self.as_of.at = at

    def act(self, what: Any) -> Callable[[], None]:
        return lambda: self.done.append((what, self.as_of.at, threading.current_thread()))

    def noted(self) -> threading.Event:
        """Set once something more has been put down."""
        put, at = threading.Event(), self.agenda.at

        def note(*said: Any, **more: Any) -> None:
            at(*said, **more)
            put.set()

        self.agenda.at = note  # type: ignore[method-assign]
        return put

    def until(self, moment: float) -> None:
        """The clock says `moment`, and all that is due by then has been done."""
        self.time = moment
        self.agenda.wait(-1e9, lambda: None)  # the earliest of all: the thread looks at the clock
        self.agenda.wait(moment, lambda: None)

    @property
    def order(self) -> list[Any]:
        return [what for what, _, _ in self.done]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.agenda.close()


@settings(deadline=None, max_examples=60)
@given(steps=st.lists(st.tuples(st.lists(moments, max_size=6), moments), min_size=1, max_size=6))
def test_at_any_moment_what_is_due_has_been_done_in_order_and_nothing_else(
    steps: list[tuple[list[float], float]],
) -> None:
    """(what is put down, then how far the clock moves): a list that is sorted anew at each step, stably."""
    world, waiting, expected, number = World(), [], [], 0
    for dues, by in steps:
        for due in dues:
            number += 1
            world.agenda.at(due, world.act(number))
            waiting.append((due, number))
            # one that is overdue is done at once: before those that are put down after it
            if due <= world.time:
                world.agenda.wait(world.time, lambda: None)
                waiting.remove((due, number))
                expected.append((number, due))
        world.until(world.time + by)
        due_now = sorted([one for one in waiting if one[0] <= world.time], key=lambda one: one[0])
        waiting = [one for one in waiting if one[0] > world.time]
        expected += [(number, due) for due, number in due_now]
        assert [(what, as_of) for what, as_of, _ in world.done] == expected
    world.agenda.close()
    expected += [(number, due) for due, number in sorted(waiting, key=lambda one: one[0])]
    assert [(what, as_of) for what, as_of, _ in world.done] == expected, "the rest at the end, in order too"


def test_whoever_puts_it_down_and_in_whichever_order(world: World) -> None:
    """Eight threads put down what is due much later; the clock jumps over all of it."""
    numbers = list(range(1, 801))
    random.Random(1).shuffle(numbers)

    def put(mine: list[int]) -> None:
        for number in mine:
            world.agenda.at(float(number), world.act(number))

    threads = [threading.Thread(target=put, args=(numbers[n::8],)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert world.order == []
    world.until(1000.0)
    assert world.order == sorted(numbers)
    assert len({thread for _, _, thread in world.done}) == 1


def test_it_counts_as_of_another_moment_where_that_is_said(world: World) -> None:
    world.agenda.at(5.0, world.act("later"), as_of=3.0)
    world.until(5.0)
    assert [(what, as_of) for what, as_of, _ in world.done] == [("later", 3.0)]


def test_what_is_put_down_by_an_act_takes_its_turn(world: World) -> None:
    def first() -> None:
        world.act("first")()
        world.agenda.at(2.0, world.act("between"))
        world.agenda.at(1.0, world.act("overdue"))
        world.agenda.at(9.0, world.act("last"))

    world.agenda.at(1.0, first)
    world.agenda.at(3.0, world.act("second"))
    world.until(4.0)
    assert world.order == ["first", "overdue", "between", "second"]
    world.until(9.0)
    assert world.order[4:] == ["last"]


def test_an_act_that_raises_does_not_stop_what_follows(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise RuntimeError("a bug")

    world.agenda.at(1.0, broken)
    world.agenda.at(2.0, world.act("after"))
    with caplog.at_level(logging.ERROR):
        world.until(2.0)
    assert world.order == ["after"]
    assert "a bug" in caplog.text


@pytest.mark.parametrize("never", [1e300, float("inf")])
def test_what_is_due_in_another_age_does_not_stop_what_is_due_now(world: World, never: float) -> None:
    world.agenda.at(never, world.act("never"))
    world.until(1.0)
    world.agenda.at(1.0, world.act("now"))
    world.until(1.0)
    assert world.order == ["now"]


@settings(deadline=None, max_examples=10)
@given(delays=st.lists(st.integers(0, 15), min_size=1, max_size=12))
def test_by_a_real_clock_nothing_is_done_before_its_moment(delays: list[int]) -> None:
    agenda, done = Agenda(), []
    start = time.monotonic() + 0.005
    dues = [start + delay / 1e3 for delay in delays]
    for number, due in enumerate(dues):
        agenda.at(due, lambda number=number: done.append((number, time.monotonic())))
    agenda.wait(max(dues), lambda: None)
    assert sorted(number for number, _ in done) == list(range(len(dues)))
    assert all(at >= dues[number] for number, at in done)
    agenda.close()


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_waiting_gives_what_it_gives_and_raises_what_it_raises(world: World) -> None:
    assert world.agenda.wait(0.0, lambda: 42) == 42
    for error in (KeyError("x"), TimeoutError("its own")):

        def broken(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error), match=str(error.args[0])):
            world.agenda.wait(0.0, broken)


def test_whoever_waits_too_long_hears_so_and_it_is_not_done_afterwards(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    go = threading.Event()
    world.agenda.at(0.0, lambda: go.wait(WAIT_S))
    with pytest.raises(DeadlineError, match="overloaded"):
        world.agenda.wait(0.0, world.act("given up"))
    monkeypatch.setattr(module, "PATIENCE_S", WAIT_S)
    go.set()
    world.until(1.0)
    assert world.order == []


def test_what_has_begun_when_patience_ends_is_known_to_whoever_waits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()

    class Impatient(Future[int]):
        """Whoever waits has no patience left as soon as it has begun, and then a little more."""

        def result(self, timeout: float | None = None) -> int:
            if not go.is_set():
                assert begun.wait(WAIT_S)
                go.set()
                raise TimeoutError
            return super().result(timeout)

    def slow() -> int:
        begun.set()
        return 7 if go.wait(WAIT_S) else 0

    monkeypatch.setattr(module, "Future", Impatient)
    assert world.agenda.wait(0.0, slow) == 7


# --- what is put off because something earlier may still come ---------------------------------------------------------


class Owed:
    """Nothing that counts before `moment` is still to come."""

    def __init__(self, moment: float) -> None:
        self.moment = moment
        self.given_up = threading.Event()

    def until(self) -> float:
        return math.inf if self.given_up.is_set() else self.moment

    def give_up(self) -> None:
        self.given_up.set()


def test_what_is_cautious_lets_go_first_what_comes_late_but_counts_before_it(world: World) -> None:
    """Nothing else is done meanwhile that counts after it; and it is done once nothing earlier can come."""
    owed = world.agenda.expected = Owed(3.0)
    told = threading.Event()
    world.agenda.at(4.0, world.act("gate"), cautious=True)
    world.agenda.at(5.0, world.act("after"))
    world.time = 6.0
    world.agenda.wait(-1e9, lambda: None)
    world.agenda.at(3.5, world.act("prediction"))
    world.agenda.wait(-1e9, lambda: None)
    assert world.order == ["prediction"]
    owed.moment = 4.5
    world.agenda.at(5.5, told.set)
    world.agenda.notify()
    assert told.wait(WAIT_S)
    assert world.order == ["prediction", "gate", "after"]
    assert not owed.given_up.is_set()


def test_what_is_not_cautious_waits_for_nothing(world: World) -> None:
    world.agenda.expected = Owed(0.0)
    world.agenda.at(4.0, world.act("it"))
    world.time = 4.0
    world.agenda.at(4.0, (told := threading.Event()).set)
    assert told.wait(WAIT_S)
    assert world.order == ["it"]


def test_caution_ends_and_nothing_is_expected_any_more() -> None:
    """By the real clock: not before CAUTION_S, and then for good."""
    agenda, done = Agenda(), []
    owed = agenda.expected = Owed(0.0)
    start = time.monotonic()
    agenda.at(start, lambda: done.append(time.monotonic()), cautious=True)
    assert agenda.wait(start, lambda: 5) == 5
    assert done[0] >= start + module.CAUTION_S
    assert owed.given_up.is_set()
    agenda.close()


def test_caution_ends_when_the_agenda_is_closed(world: World) -> None:
    owed = world.agenda.expected = Owed(0.0)
    world.agenda.at(0.0, world.act("gate"), cautious=True)
    world.agenda.close()
    assert world.order == ["gate"]
    assert not owed.given_up.is_set()


# --- closing ----------------------------------------------------------------------------------------------------------


def test_close_does_what_is_left_in_order_and_ends_the_thread(world: World) -> None:
    for due in (30.0, 10.0, 20.0):
        world.agenda.at(due, world.act(due))
    world.agenda.close()
    assert world.order == [10.0, 20.0, 30.0]
    thread = world.done[0][2]
    assert not thread.is_alive()
    world.agenda.close()
    world.agenda.at(5.0, world.act("afterwards"), as_of=4.0)
    assert world.done[-1] == ("afterwards", 4.0, threading.current_thread()), "by whoever brings it, at once"
    assert world.agenda.wait(99.0, lambda: 7) == 7


def test_closed_before_anything_was_put_down() -> None:
    world = World()
    world.agenda.close()
    world.agenda.at(9.0, world.act("it"))
    assert world.done == [("it", 9.0, threading.current_thread())]


def test_what_comes_while_the_last_are_being_done_does_not_overtake_them(world: World) -> None:
    """An act of the rest is held; meanwhile something else is put down."""
    begun, go = threading.Event(), threading.Event()

    def held() -> None:
        begun.set()
        assert go.wait(WAIT_S)
        world.act("held")()

    world.agenda.at(10.0, held)
    world.agenda.at(20.0, world.act("behind it"))
    closing = threading.Thread(target=world.agenda.close)
    closing.start()
    assert begun.wait(WAIT_S)
    world.agenda.at(30.0, world.act("meanwhile"))
    assert world.done == []
    go.set()
    closing.join(WAIT_S)
    assert world.order == ["held", "behind it", "meanwhile"]
    assert len({thread for _, _, thread in world.done}) == 1


def test_close_lets_those_go_who_wait(world: World) -> None:
    found: list[int] = []
    put = world.noted()
    waiting = threading.Thread(target=lambda: found.append(world.agenda.wait(1e6, lambda: 3)))
    waiting.start()
    assert put.wait(WAIT_S)
    world.agenda.close()
    waiting.join(WAIT_S)
    assert found == [3]


def test_an_act_may_close_the_agenda(world: World) -> None:
    world.agenda.at(1.0, world.agenda.close)
    world.agenda.at(8.0, world.act("left"))
    world.until(1.0)
    world.agenda.close()
    assert world.order == ["left"]

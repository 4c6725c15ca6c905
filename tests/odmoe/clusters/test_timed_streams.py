"""Messages that travel: in the order of their times, none before it is due, all before the stream is closed.

The clock is the test's own and stands still until it is moved.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odmoe.clusters.timed_streams import MainStreamEnd, StreamEnd, TimedHandler
from scheduler.emulation.clock import CREDIT_S
from scheduler.emulation.expected_predictions import ExpectedPredictions
from scheduler.errors import LinkError, ODMoEError, ProtocolError
from scheduler.timing.links import MainLinks
from support.nodes.timed_streams import HERE, PROFILE, WAIT_S, End, World, load, main_end, rows, stamped
from wire.messages import (
    Align,
    AskUsage,
    Compute,
    Computed,
    Draft,
    Evict,
    Hello,
    Loaded,
    Message,
    OpenRequest,
    Prediction,
    ShadowProgress,
    Stamped,
    Tensor,
)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.emulation.close()


# --- when what arrives ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "leaves", "comes"),
    [
        (Compute(1, 0, 0, 0, rows(1), rows(1), True), 0.00045, 0.0),
        (Compute(1, 0, 0, 0, rows(128), rows(128), True), 0.016777216, 0.0),
        (Computed(1, rows(1), 0.0), 0.0, 0.00045),
        (Computed(1, rows(64), 0.0), 0.0, 0.008388608),
        (Prediction(1, 5, 0, (1, 2), (0.5, 0.5)), 0.0, 0.00045),
        (Draft(1, 5, 3, 7), 0.0, 0.00045),
        (Align(1, 0, 7, 0, ()), 0.00045, 0.0),
        (load(1), 0.0, 0.0),
        (Evict(0), 0.0, 0.0),
        (Loaded(1, 4096, 0.1), 0.0, 0.0),
        (AskUsage(), 0.0, 0.0),
        (Hello(1, "", "", ""), 0.0, 0.0),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, float) else "",
)
def test_each_message_takes_what_the_profile_says(message: Message, leaves: float, comes: float) -> None:
    """On the main node's end; a node's own knows nothing of the links."""
    assert main_end().on_sent(message, 10.0) == pytest.approx(10 + leaves)
    assert main_end().arrives(message, 10.0) == pytest.approx(10 + comes)
    assert StreamEnd().on_sent(message, 10.0) == StreamEnd().arrives(message, 10.0) == 10.0


@pytest.mark.parametrize("message", [Prediction(1, 5, 0, (1, 2), (0.5, 0.5)), Draft(1, 5, 3, 7)])
def test_what_the_shadow_sends_says_how_far_it_is(message: Message) -> None:
    expected = ExpectedPredictions(PROFILE)
    end = MainStreamEnd(MainLinks(PROFILE), expected)
    step_s = PROFILE.shadow_layer_s + PROFILE.hop_s
    end.on_sent(OpenRequest(1, (5, 6), 0, 9, 1, 1, 2, False), 9.0)
    reaches = end.on_sent(Align(1, 0, 7, 2, (), drafts=4), 10.0)
    assert expected.until() == pytest.approx(reaches + step_s)
    end.on_received(message, 10.5)
    assert expected.until() == pytest.approx(10.5 + step_s)
    end.on_received(ShadowProgress(1, 0, idle=True), 10.6)
    assert expected.until() == math.inf


def test_alignment_in_parts_shares_its_link() -> None:
    """8,192 bytes a token a layer over 1 Gbit/s; two tensors are one layer."""
    nothing, state = Tensor("uint8", (0,), b""), Tensor("uint8", (1, 99, 4), bytes(396))
    kv = (*(Tensor("uint8", (1, 1, 16, 1), bytes(16)) for _ in range(8)), nothing, state)
    way, one = main_end(), 16 * 4 * 8192 * 8 / 1e9
    found = [way.on_sent(Align(1, 0, None, start, kv, more=start < 32), 10.0) for start in (0, 16, 32)]
    assert found == pytest.approx([10 + one, 10 + 2 * one, 10 + 3 * one])
    found = [way.on_sent(Align(1, 1, None, start, kv, more=start < 32), 20.0) for start in (0, 16, 32)]
    assert found == pytest.approx([20 + one, 20 + 2 * one, 20 + 3 * one])
    assert way.on_sent(Align(1, 2, 5, 0, ()), 30.0) == pytest.approx(30 + PROFILE.hop_s)


@settings(deadline=None, max_examples=40)
@given(
    streams=st.lists(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=6), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_answers_of_several_streams_share_the_main_nodes_link(streams: list[list[tuple[int, bool]]], seed: int) -> None:
    """(sent so many ms after the stream's last, has 64 rows or 1): one server for all of them, in the order of their
    times, however they were shuffled on the way here; then each stream in its own order."""
    world, way = World(), main_end()
    sent, places = [], []
    for number, messages in enumerate(streams):
        at = 101.0 + number * 1e-4  # no two at one moment
        for call, (gap, large) in enumerate(messages):
            at += gap / 1e3
            sent.append((at, number, call, 64 if large else 1))
        places += [number] * len(messages)
    random.Random(seed).shuffle(places)
    handlers = [world.stream(str(number), way) for number in range(len(streams))]
    waiting = [[one for one in sent if one[1] == number] for number in range(len(streams))]
    for place in places:
        at, _, call, count = waiting[place].pop(0)
        handlers[place].on_message(Stamped(at, 0.0, HERE, Computed(call, rows(count), 0.0)))
    assert world.told == []
    free, expected = 0.0, []
    for at, number, call, count in sorted(sent):
        free = max(free, at) + count * 16384 * 8 / 1e9
        expected.append((max(free, at + 0.00045), at, str(number), call))
    world.until(200.0)
    world.emulation.close()
    for number in {number for _, number, _, _ in sent}:
        mine = [call for name, call, _ in world.told if name == str(number)]
        assert mine == sorted(mine), "in the order in which they were sent"
    latest: dict[str, float] = {}
    turns = []
    for order, (due, _, name, call) in enumerate(expected):
        latest[name] = max(latest.get(name, 0.0), due)
        turns.append((latest[name], order, name, call))
    assert [(name, call) for name, call, _ in world.told] == [(name, call) for _, _, name, call in sorted(turns)]


# --- in which order ---------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(dues=st.lists(st.integers(0, 40), min_size=1, max_size=25), seed=st.integers(0, 99))
def test_streams_are_told_in_the_order_of_their_times(dues: list[int], seed: int) -> None:
    """Each message on a stream of its own, put there by four threads in any order."""
    world = World()
    handlers = [world.stream("", None) for _ in dues]
    order = list(range(len(dues)))
    random.Random(seed).shuffle(order)

    def bring(mine: list[int]) -> None:
        for number in mine:
            handlers[number].on_message(stamped(101 + dues[number] / 1e3, number))

    threads = [threading.Thread(target=bring, args=(order[n::4],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert world.told == []
    world.until(101.05)
    assert [at for _, _, at in world.told] == pytest.approx(sorted(101 + due / 1e3 for due in dues))
    assert all(at == pytest.approx(101 + dues[number] / 1e3) for _, number, at in world.told)
    world.emulation.close()


@settings(deadline=None, max_examples=40)
@given(dues=st.lists(st.integers(0, 100), min_size=1, max_size=20), late=st.integers(0, 120))
def test_a_stream_keeps_its_order_and_each_counts_as_of_its_time(dues: list[int], late: int) -> None:
    """The clock is at `late` ms already when they come: what is overdue is told at once, as of when it was due."""
    world = World()
    world.time = 101 + late / 1e3
    handler = world.stream("it")
    for number, due in enumerate(dues):
        handler.on_message(stamped(101 + due / 1e3, number))
    world.until(101.125)
    assert [number for _, number, _ in world.told] == list(range(len(dues)))
    assert [at for _, _, at in world.told] == pytest.approx([101 + due / 1e3 for due in dues])
    world.emulation.close()


def test_lateness_counts_up_to_the_credit(world: World) -> None:
    handler = world.stream("it")
    world.time = 200.0
    handler.on_message(stamped(150.0, 1))
    world.until(200.0)
    assert world.told == [("it", 1, 200.0 - CREDIT_S)]


def test_what_comes_late_does_not_overtake_what_waits_already(world: World) -> None:
    """The machine looks up after the first two were due, and the third is older than they are."""

    class Half(StreamEnd):
        def arrives(self, message: Message, at: float) -> float:
            return at + (0.05 if message != load(3) else 0.0)

    first, second = world.stream("first", Half()), world.stream("second", Half())
    first.on_message(stamped(100.01, 1))
    first.on_message(stamped(100.02, 2))
    second.on_message(stamped(100.0, 9))
    world.until(100.02)
    assert world.told == []
    world.time = 100.15  # the agenda has not noticed
    first.on_message(stamped(100.03, 3))
    world.until(100.15)
    expected = [("second", 9, 100.05), ("first", 1, 100.06), ("first", 2, 100.07), ("first", 3, 100.03)]
    assert [(name, number, pytest.approx(at)) for name, number, at in expected] == world.told


# --- another machine, and no emulation --------------------------------------------------------------------------------


@pytest.mark.parametrize(("due", "counts"), [(7.5, 100.5), (7.0, 100.0), (6.95, 99.95)])
def test_another_machines_message_takes_as_long_as_it_says(world: World, due: float, counts: float) -> None:
    """Its clock says seven, and ours a hundred; nothing is told before it is due."""
    handler = world.stream("it")
    handler.on_message(stamped(due, 1, "another machine", sent=7.0))
    world.until(max(100.0, counts - 0.001))
    assert bool(world.told) is (counts <= 100)
    world.until(max(100.0, counts))
    assert world.told == [("it", 1, pytest.approx(counts))]


def test_what_has_no_stamp_is_handed_on_as_it_comes(world: World) -> None:
    handler = world.stream("it")
    handler.on_message(load(1))
    assert [number for _, number, _ in world.told] == [1]


# --- the end ----------------------------------------------------------------------------------------------------------


def test_the_end_comes_behind_all_that_is_on_its_way(world: World) -> None:
    class Slow(StreamEnd):
        def arrives(self, message: Message, at: float) -> float:
            return at + 1.0

    handler = world.stream("it", Slow())
    for number in range(3):
        handler.on_message(stamped(101.0 + number, number))
    handler.on_close(None)
    world.until(103.999)
    assert [number for _, number, _ in world.told] == [0, 1]
    world.until(104.0)
    assert [number for _, number, _ in world.told] == [0, 1, 2, -1]


def test_the_end_of_a_stream_that_carried_nothing_comes_now(world: World) -> None:
    world.stream("it").on_close(None)
    world.until(100.0)
    assert world.told == [("it", -1, 100.0)]


def test_when_the_emulation_ends_all_that_is_on_its_way_is_told(world: World) -> None:
    one, other = world.stream("one"), world.stream("other")
    one.on_message(stamped(900.0, 1))
    other.on_message(stamped(800.0, 2))
    one.on_message(stamped(950.0, 3))
    one.on_close(None)
    world.emulation.close()
    assert [(name, number) for name, number, _ in world.told] == [("other", 2), ("one", 1), ("one", 3), ("one", -1)]
    other.on_message(stamped(990.0, 4))
    assert world.told[-1][:2] == ("other", 4), "and what comes afterwards is told by whoever brings it"


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ProtocolError("it makes no sense"), "it makes no sense"),
        (RuntimeError("a bug"), r"handling a message failed: RuntimeError\('a bug'\)"),
    ],
    ids=["ours", "a bug"],
)
def test_a_handler_that_fails_ends_its_stream(
    world: World, raised: Exception, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with the reason; nothing else is told it, and other streams go on."""
    ends: list[ODMoEError | None] = []
    heard: list[Message] = []
    cuts: list[int] = []

    class Failing:
        def on_message(self, message: Message) -> None:
            heard.append(message)
            raise raised

        def on_close(self, error: ODMoEError | None) -> None:
            ends.append(error)

    handler = TimedHandler(Failing(), StreamEnd(), world.emulation, lambda: cuts.append(1))
    other = world.stream("other")
    for number in (1, 2):
        handler.on_message(stamped(101.0, number))
        other.on_message(stamped(101.0, number))
    handler.on_close(None)
    with caplog.at_level(logging.CRITICAL):
        world.until(102.0)
    assert heard == [load(1)]
    assert cuts == [1]
    assert len(ends) == 1
    with pytest.raises(type(raised) if isinstance(raised, ODMoEError) else LinkError, match=told):
        raise ends[0]  # type: ignore[misc]
    assert [number for _, number, _ in world.told] == [1, 2]


def test_a_message_that_cannot_be_timed_ends_its_stream(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Lost, it would be waited for."""
    ends: list[ODMoEError | None] = []
    cuts: list[int] = []
    end = End(world.emulation)
    end.on_close = ends.append  # type: ignore[method-assign]
    handler = TimedHandler(end, main_end(), world.emulation, lambda: cuts.append(1))
    for number in (1, 2):
        handler.on_message(Stamped(101.0, 100.0, HERE, Computed(number, Tensor("uint8", (), b"x"), 0.0)))
    handler.on_close(None)
    with caplog.at_level(logging.CRITICAL):
        world.until(102.0)
    assert (end.heard(), cuts, len(ends)) == ([], [1], 1)
    assert isinstance(ends[0], LinkError)

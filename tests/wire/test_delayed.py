"""Messages that travel: not before they are due, in order, at the latest when the stream is closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.emulation import Emulation
from scheduler.errors import LinkError, ODMoEError, ProtocolError
from scheduler.profile import find_profile
from wire import delayed as module
from wire import inprocess
from wire.delayed import DelayedChannel, DelayedNode, delays
from wire.messages import (
    Align,
    AskUsage,
    Compute,
    Computed,
    Echo,
    Evict,
    Hello,
    Load,
    Loaded,
    Message,
    Prediction,
    Tensor,
)

WAIT_S = 20.0
PROFILE = find_profile("rtx3090-1gbe")


class End:
    """Both ends of a stream: keeps what arrives, when, and at which emulated time."""

    def __init__(self, emulation: Emulation) -> None:
        self.emulation = emulation
        self.got: SimpleQueue[tuple[Message, float, float]] = SimpleQueue()
        self.closed = threading.Event()
        self.hold = threading.Event()
        self.hold.set()

    def on_message(self, message: Message) -> None:
        self.hold.wait(WAIT_S)
        self.got.put((message, time.monotonic(), self.emulation.now()))

    def on_close(self, error: ODMoEError | None) -> None:
        self.closed.set()

    def accept(self, reply: Any) -> End:
        self.reply = reply
        return self

    def close(self) -> None:
        pass


@pytest.fixture
def emulation() -> Emulation:
    return Emulation(PROFILE)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + WAIT_S
    while any(thread.name == "odmoe-delay" for thread in set(threading.enumerate()) - before):
        assert time.monotonic() < deadline, "a delayed stream's thread outlives it"
        time.sleep(0.01)


def load(number: int) -> Load:
    return Load(number, 0, 0, 0)


def rows(count: int) -> Tensor:
    return Tensor("uint8", (count, 2), bytes(2 * count))


# --- how long what travels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "seconds"),
    [
        (Compute(1, 0, 0, 0, rows(1), rows(1), True), 0.00045),
        (Compute(1, 0, 0, 0, rows(128), rows(128), True), 0.016777216),
        (Computed(1, rows(1), 0.0), 0.00045),
        (Computed(1, rows(64), 0.0), 0.008388608),
        (Prediction(1, 5, 0, (1, 2), (0.5, 0.5)), 0.00045),
        (Align(1, 0, 7, 0, ()), 0.00045),
        (load(1), 0.0),
        (Evict(0), 0.0),
        (Loaded(1, 4096, 0.1), 0.0),
        (AskUsage(), 0.0),
        (Hello(1, "", "", ""), 0.0),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, float) else "",
)
def test_each_message_takes_what_the_profile_says(message: Message, seconds: float) -> None:
    assert delays(PROFILE)(message) == pytest.approx(seconds)


def test_alignment_in_parts_shares_its_link() -> None:
    """8,192 bytes a token a layer over 1 Gbit/s; two tensors are one layer."""
    nothing, state = Tensor("uint8", (0,), b""), Tensor("uint8", (1, 99, 4), bytes(396))
    kv = (*(Tensor("uint8", (1, 1, 16, 1), bytes(16)) for _ in range(8)), nothing, state)
    delay = delays(PROFILE)
    one = 16 * 4 * 8192 * 8 / 1e9
    for _ in range(2):
        found = [delay(Align(1, 0, None, start, kv, more=start < 32)) for start in (0, 16, 32)]
        assert found == pytest.approx([one, 2 * one, 3 * one])
    assert delay(Align(1, 1, 5, 0, ())) == PROFILE.hop_s


# --- the stream -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(travel=st.lists(st.integers(0, 12), min_size=1, max_size=12))
def test_not_before_it_is_due_and_in_order(emulation: Emulation, travel: list[int]) -> None:
    end = End(emulation)
    channel = DelayedChannel(inprocess.connect(end, End(emulation)), lambda m: travel[m.load_id] / 1e3, emulation)
    sent = []
    for number in range(len(travel)):
        sent.append((time.monotonic(), emulation.now()))
        channel.send(load(number))
    for number, milliseconds in enumerate(travel):
        message, arrived, at = end.got.get(timeout=WAIT_S)
        assert message == load(number)
        assert arrived >= sent[number][0] + milliseconds / 1e3
        assert at <= arrived
        assert at >= sent[number][1] + milliseconds / 1e3 - 1e-6
    channel.close()


def test_over_each_transport(emulation: Emulation, kit: Any, open_stream: Callable[[Any, Any], Any]) -> None:
    there, here = kit.EchoNode(), kit.Recorder()
    channel = DelayedChannel(
        open_stream(DelayedNode(there, lambda: lambda m: 0.02, emulation), here), lambda m: 0.03, emulation
    )
    start = time.monotonic()
    for number in range(1, 4):
        channel.send(load(number))
    assert [message.load_id for message in here.take(3)] == [1, 2, 3]
    assert time.monotonic() - start >= 0.05
    channel.close()


def test_what_its_stream_takes_by_itself_is_taken_off(emulation: Emulation) -> None:
    """An Echo tells it, half of it for each direction, on the way there and on the way back."""
    node, main = End(emulation), End(emulation)
    answering = DelayedNode(node, lambda: delays(PROFILE), emulation)
    channel = DelayedChannel(
        inprocess.connect(answering, main), lambda m: 3600.0 if isinstance(m, Load) else 0, emulation
    )
    channel.send(Echo(1, 2 * 3599.8))
    assert node.got.get(timeout=WAIT_S)[0] == Echo(1, 2 * 3599.8)
    start = time.monotonic()
    channel.send(load(1))
    assert node.got.get(timeout=WAIT_S)[0] == load(1)
    assert time.monotonic() - start >= 0.2 - 1e-6, "it is not handed on that early"
    start = time.monotonic()
    node.reply.send(Computed(1, rows(128 * 600), 0.0))  # ten seconds
    assert main.got.get(timeout=WAIT_S)[0].call_id == 1
    assert time.monotonic() - start < 9
    channel.close()


def test_close_hands_over_what_is_on_its_way(emulation: Emulation) -> None:
    end = End(emulation)
    channel = DelayedChannel(inprocess.connect(end, End(emulation)), lambda m: 3600.0, emulation)
    for number in range(3):
        channel.send(load(number))
    assert end.got.empty()
    channel.close()
    channel.close()
    assert [end.got.get(timeout=WAIT_S)[0].load_id for _ in range(3)] == [0, 1, 2]
    assert end.closed.wait(WAIT_S)
    with pytest.raises(LinkError, match="closed"):
        channel.send(load(4))


def test_no_more_than_so_many_are_on_their_way(emulation: Emulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HELD", 5)
    channel = DelayedChannel(inprocess.connect(End(emulation), End(emulation)), lambda m: 3600.0, emulation)
    for number in range(5):
        channel.send(load(number))
    with pytest.raises(LinkError, match="5 messages"):
        channel.send(load(5))
    channel.close()


def test_a_peer_that_is_busy_holds_up_no_sender(emulation: Emulation) -> None:
    end = End(emulation)
    end.hold.clear()
    channel = DelayedChannel(inprocess.connect(end, End(emulation)), lambda m: 0.0, emulation)
    for number in range(10):
        channel.send(load(number))
    end.hold.set()
    assert [end.got.get(timeout=WAIT_S)[0].load_id for _ in range(10)] == list(range(10))
    channel.close()


@pytest.mark.parametrize("error", [LinkError("it is gone"), ProtocolError("too large"), RuntimeError("a bug")])
def test_a_message_that_cannot_be_handed_on_ends_the_stream(emulation: Emulation, error: Exception) -> None:
    ended = threading.Event()

    class Broken:
        def send(self, message: Message) -> None:
            raise error

        def close(self) -> None:
            ended.set()

    channel = DelayedChannel(Broken(), lambda m: 0.0, emulation)
    channel.send(load(1))
    assert ended.wait(WAIT_S)
    with pytest.raises(type(error) if isinstance(error, ODMoEError) else LinkError, match=str(error)):
        channel.send(load(2))


@pytest.mark.parametrize("who", ["node", "main"])
def test_a_nodes_answers_travel_until_either_end_closes(emulation: Emulation, who: str) -> None:
    node, main = End(emulation), End(emulation)
    channel = inprocess.connect(DelayedNode(node, lambda: delays(PROFILE), emulation), main)
    start = time.monotonic()
    node.reply.send(Computed(1, rows(128), 0.0))
    message, arrived, _ = main.got.get(timeout=WAIT_S)
    assert isinstance(message, Computed)
    assert arrived - start >= 0.016777
    (node.reply if who == "node" else channel).close()
    assert main.closed.wait(WAIT_S)
    assert node.closed.wait(WAIT_S)
    with pytest.raises(LinkError):
        node.reply.send(load(1))

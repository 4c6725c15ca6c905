"""Messages that travel over each transport, by the real clock: none before it is due, each once and in order."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from odmoe.clusters.timed_streams import StreamEnd, TimedChannel, TimedHandler, TimedNode
from scheduler.emulation.clock import Emulation
from scheduler.errors import LinkError
from support.nodes.timed_streams import PROFILE, WAIT_S, End, load, main_end, rows
from wire import inprocess
from wire.base import Channel, Handler, Node
from wire.messages import (
    AskTrace,
    AskUsage,
    Compute,
    Computed,
    Echo,
    Evict,
    Failed,
    Hello,
    Load,
    Loaded,
    Message,
    TraceRecords,
    WorkerReady,
    WorkerUsage,
)

Open = Callable[[Node, Handler], Channel]


@pytest.fixture
def emulation() -> Iterator[Emulation]:
    """By the real clock."""
    before = set(threading.enumerate())
    made = Emulation(PROFILE)
    yield made
    made.close()
    assert [one.name for one in threading.enumerate() if one not in before and one.name == "odmoe-agenda"] == []


ASKED: tuple[Message, ...] = (
    Hello(4, "a", "b", "c", True),
    load(1),
    Evict(3),
    Compute(1, 0, 0, 0, rows(2), rows(2), True),
    AskUsage(),
    AskTrace(),
    Echo(5),
)
SAID: tuple[Message, ...] = (
    WorkerReady(4, "w", 1, 100, "cpu", "disk", "box", 7, "a processor", 1, 2.0),
    Loaded(1, 10, 0.5),
    Computed(1, rows(2), 0.5),
    WorkerUsage(1, 2, 3, 4),
    TraceRecords("m", 1.0, ("a",), ("b",), (1.0,), (2.0,), False),
    Failed("E", "m", 1, 2, 3),
    Echo(5),
)


def open_timed(node: End, main: End, emulation: Emulation, open_stream: Open, way: StreamEnd) -> TimedChannel:
    inner = open_stream(TimedNode(node, emulation), TimedHandler(main, way, emulation))
    return TimedChannel(inner, way, emulation)


def test_every_kind_over_each_transport(emulation: Emulation, open_stream: Open) -> None:
    node, main = End(emulation), End(emulation)
    channel = open_timed(node, main, emulation, open_stream, main_end())
    start = time.monotonic()
    for message in ASKED:
        channel.send(message)
    assert node.take(len(ASKED)) == list(ASKED)
    assert time.monotonic() - start >= PROFILE.hop_s
    for message in SAID:
        node.reply.send(message)
    assert main.take(len(SAID)) == list(SAID)
    channel.close()
    assert node.closed.wait(WAIT_S)
    assert main.closed.wait(WAIT_S)
    with pytest.raises(LinkError, match="closed"):
        channel.send(load(4))


@pytest.mark.parametrize("travel", [[5, 0, 12, 3], [30], [0, 0, 0]])
def test_never_before_it_is_due_and_in_order(emulation: Emulation, open_stream: Open, travel: list[int]) -> None:
    class Given(StreamEnd):
        def on_sent(self, message: Message, at: float) -> float:
            return at + travel[message.load_id] / 1e3 if isinstance(message, Load) else at

    node, main = End(emulation), End(emulation)
    channel = open_timed(node, main, emulation, open_stream, Given())
    sent = []
    for number in range(len(travel)):
        sent.append(emulation.now())
        channel.send(load(number))
    for number, milliseconds in enumerate(travel):
        message, at, arrived = node.got.get(timeout=WAIT_S)
        assert message == load(number)
        assert arrived >= at >= sent[number] + milliseconds / 1e3 - 1e-6
    channel.close()


@pytest.mark.parametrize("who", ["node", "main"])
def test_either_end_closes(emulation: Emulation, open_stream: Open, who: str) -> None:
    node, main = End(emulation), End(emulation)
    channel = open_timed(node, main, emulation, open_stream, main_end())
    channel.send(load(1))
    node.take(1)
    node.reply.send(Computed(1, rows(128), 0.0))
    main.take(1)
    (node.reply if who == "node" else channel).close()
    assert main.closed.wait(WAIT_S)
    assert node.closed.wait(WAIT_S)
    assert main.ends == node.ends == [None]


def test_the_main_node_hears_of_a_node_whose_handler_fails(
    emulation: Emulation, open_stream: Open, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(End):
        def on_message(self, message: Message) -> None:
            raise RuntimeError("a bug")

    node, main = Failing(emulation), End(emulation)
    channel = open_timed(node, main, emulation, open_stream, StreamEnd())
    with caplog.at_level(logging.CRITICAL):
        channel.send(load(1))
        assert main.closed.wait(WAIT_S)
    assert node.closed.wait(WAIT_S)
    assert isinstance(node.ends[0], LinkError)
    channel.close()


def test_many_threads_lose_nothing(emulation: Emulation) -> None:
    """Two threads a node answer at once while the main node asks: every message once, each thread's in order."""
    way, count = main_end(), 150
    nodes, mains, channels = [], [], []
    for _ in range(4):
        node, main = End(emulation), End(emulation)
        nodes.append(node)
        mains.append(main)
        channels.append(open_timed(node, main, emulation, inprocess.connect, way))

    def say(node: End, first: int) -> None:
        for number in range(count):
            node.reply.send(Loaded(first + number, 1, 0.0))
            if number % 3 == 0:
                node.reply.send(Computed(first + number, rows(1), 0.0))

    threads = [threading.Thread(target=say, args=(node, first)) for node, first in itertools.product(nodes, (0, 1000))]
    for thread in threads:
        thread.start()
    for number in range(count):
        for channel in channels:
            channel.send(load(number))
    for thread in threads:
        thread.join(WAIT_S)
    for channel in channels:
        channel.close()
    for node, main in zip(nodes, mains, strict=True):
        assert main.closed.wait(WAIT_S)
        assert node.closed.wait(WAIT_S)
        assert [message for message, _ in node.heard()] == [load(number) for number in range(count)]
        heard = [message for message, _ in main.heard()]
        for first in (0, 1000):
            mine = [m.load_id for m in heard if isinstance(m, Loaded) and first <= m.load_id < first + count]
            assert mine == list(range(first, first + count))
        assert sum(isinstance(m, Computed) for m in heard) == 2 * len(range(0, count, 3))

"""What a stream promises, whatever carries it."""

from __future__ import annotations

import threading

import pytest

from scheduler.errors import LinkError
from support.nodes.streams import EchoNode, Listening, Recorder
from wire.messages import AskUsage, Compute, Computed, Evict, Load, Loaded, Tensor, WorkerUsage

HIDDEN = Tensor("bfloat16", (2, 3), bytes(range(12)))
WEIGHTS = Tensor("float32", (2,), bytes(8))


def test_echo(open_stream):
    heard = Recorder()
    channel = open_stream(EchoNode(), heard)
    channel.send(Compute(7, 0, 3, 5, HIDDEN, WEIGHTS, evict=True))
    channel.send(AskUsage())
    assert heard.take(2) == [Computed(7, HIDDEN, 0.5), WorkerUsage(1, 2, 3, 4)]


def test_node_hears_what_was_sent(open_stream):
    node = EchoNode()
    channel = open_stream(node, Recorder())
    sent = [Compute(7, 0, 3, 5, HIDDEN, WEIGHTS, evict=False), Load(1, 0, 2, 3), Evict(0)]
    for message in sent:
        channel.send(message)
    assert node.streams[0].take(3) == sent


def test_messages_of_one_call_arrive_one_by_one_in_order(open_stream):
    """Small ones together, then some of which the last is too large to travel with the others, then one alone."""
    node, heard = EchoNode(), Recorder()
    channel = open_stream(node, heard)
    large = Compute(8, 0, 3, 5, Tensor("uint8", (2 << 20,), bytes(2 << 20)), WEIGHTS, evict=False)
    small = [Load(number, 0, 2, 3) for number in range(5)]
    channel.send(*small[:4])
    channel.send(small[4], large)
    channel.send(Evict(0))
    assert node.streams[0].take(7) == [*small, large, Evict(0)]
    assert len(heard.take(6)) == 6


def test_order_over_1000_messages(open_stream):
    heard = Recorder()
    channel = open_stream(EchoNode(), heard)
    for i in range(1000):
        channel.send(Load(i, 0, 0, 0))
    assert [message.load_id for message in heard.take(1000)] == list(range(1000))


def test_a_memoryview_is_sent_like_bytes(open_stream):
    heard = Recorder()
    channel = open_stream(EchoNode(), heard)
    backing = bytearray(range(24))
    hidden = Tensor("float32", (6,), memoryview(backing).cast("f"))
    channel.send(Compute(1, 0, 0, 0, hidden, WEIGHTS, evict=False))
    assert memoryview(heard.take(1)[0].output.data).tobytes() == bytes(backing)


def test_both_directions_at_once(open_stream):
    node, heard = EchoNode(Listening), Recorder()
    channel = open_stream(node, heard)
    there = node.streams[0]
    threads = [
        threading.Thread(target=lambda: [channel.send(Load(i, 0, 0, 0)) for i in range(500)]),
        threading.Thread(target=lambda: [there.reply.send(Loaded(i, 0, 0.0)) for i in range(500)]),
    ]
    for thread in threads:
        thread.start()
    assert [message.load_id for message in there.take(500)] == list(range(500))
    assert [message.load_id for message in heard.take(500)] == list(range(500))
    for thread in threads:
        thread.join(10)


@pytest.mark.parametrize("closer", ["client", "node"])
def test_close_ends_both_sides_once_and_in_peace(open_stream, closer):
    node, heard = EchoNode(), Recorder()
    channel = open_stream(node, heard)
    channel.send(Load(1, 0, 0, 0))
    heard.take(1)
    closing = channel if closer == "client" else node.streams[0].reply
    closing.close()
    closing.close()
    assert heard.end() is None
    assert node.streams[0].end() is None
    for end in (channel, node.streams[0].reply):
        with pytest.raises(LinkError, match="closed"):
            end.send(Load(2, 0, 0, 0) if end is channel else Loaded(2, 0, 0.0))
        end.close()
    assert len(heard.ends) == len(node.streams[0].ends) == 1


def test_what_was_sent_before_close_arrives(open_stream):
    node = EchoNode(Listening)
    channel = open_stream(node, Recorder())
    for i in range(300):
        channel.send(Evict(i))
    channel.close()
    there = node.streams[0]
    assert there.end() is None
    assert [message.slot for message in there.take(300)] == list(range(300))


def test_what_a_node_sent_before_close_arrives(open_stream):
    node, heard = EchoNode(), Recorder()
    open_stream(node, heard)
    reply = node.streams[0].reply
    for i in range(300):
        reply.send(Loaded(i, 0, 0.0))
    reply.close()
    assert heard.end() is None
    assert [message.load_id for message in heard.take(300)] == list(range(300))


def test_streams_of_one_node_are_apart(open_stream):
    node = EchoNode()
    heard = [Recorder() for _ in range(2)]
    first = open_stream(node, heard[0])
    second = open_stream(node, heard[1])
    first.close()
    assert heard[0].end() is None
    second.send(Load(9, 0, 0, 0))
    assert heard[1].take(1) == [Loaded(9, 10, 0.25)]
    assert not heard[1].ends

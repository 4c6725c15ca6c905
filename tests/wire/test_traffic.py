"""What a stream has carried: as many bytes as protobuf says that the messages have."""

from __future__ import annotations

import time

from odmoe.clusters.timed_streams import StreamEnd, TimedChannel, TimedHandler, TimedNode
from scheduler.emulation.clock import Emulation
from scheduler.timing.profile import find_profile
from support.nodes.streams import EchoNode, Recorder
from wire import inprocess, odmoe_pb2
from wire.messages import Beat, Compute, Computed, Load, Loaded, Stamped, Tensor
from wire.rpc.pulse import Pulse
from wire.traffic import traffic_of

ROW, WEIGHT = Tensor("float32", (1, 4096), bytes(16384)), Tensor("float32", (1,), bytes(4))


def size_of_compute(number: int) -> int:
    """An embedding of Mixtral's size, put together by protobuf alone."""
    hidden = {"dtype": odmoe_pb2.Tensor.FLOAT32, "shape": [1, 4096], "data": ROW.data}
    weights = {"dtype": odmoe_pb2.Tensor.FLOAT32, "shape": [1], "data": WEIGHT.data}
    compute = {"call_id": number, "slot": 1, "layer": 2, "expert": 3, "hidden": hidden, "weights": weights}
    return odmoe_pb2.ToWorker(compute=compute | {"evict": True}).ByteSize()


def size_of_computed(number: int) -> int:
    output = {"dtype": odmoe_pb2.Tensor.FLOAT32, "shape": [1, 4096], "data": ROW.data}
    return odmoe_pb2.FromWorker(computed={"call_id": number, "output": output, "seconds": 0.5}).ByteSize()


def test_both_ends_count_what_was_sent(kit):
    quick = Pulse(beat_s=0.02)
    node, heard = EchoNode(), Recorder()
    channel = kit.connect(kit.serve(node, pulse=quick).address, heard, pulse=quick)
    for number in (1, 300, 70_000):
        channel.send(Compute(number, 1, 2, 3, ROW, WEIGHT, evict=True))
    channel.send(Load(9, 0, 0, 1))
    heard.take(4)
    time.sleep(0.2)  # beats come, and are not counted
    ours, theirs = traffic_of(channel), traffic_of(node.streams[0].reply)
    assert ours is not None
    assert theirs is not None
    there, back = (sum(map(size, (1, 300, 70_000))) for size in (size_of_compute, size_of_computed))
    assert ours.sent.count_of(Compute) == theirs.received.count_of(Compute) == (3, there)
    assert ours.received.count_of(Computed) == theirs.sent.count_of(Computed) == (3, back)
    load = odmoe_pb2.ToWorker(load={"load_id": 9, "slot": 0, "layer": 0, "expert": 1}).ByteSize()
    assert ours.sent.count_of() == theirs.received.count_of() == (4, there + load)
    assert ours.received.count_of(Computed, Loaded).messages == 4
    assert ours.sent.count_of(Beat) == ours.received.count_of(Beat) == (0, 0)
    assert 16384 < there / 3 < 16384 + 64, "what the paper says, and little more"


def test_a_stamped_message_is_counted_as_what_it_is_about(kit):
    """Each end as its own: what it sends and what it receives, with the stamp's few bytes."""
    emulation = Emulation(find_profile("rtx3090-1gbe"))
    node, heard = EchoNode(), Recorder()
    inner = kit.connect(kit.serve(TimedNode(node, emulation)).address, TimedHandler(heard, StreamEnd(), emulation))
    channel = TimedChannel(inner, StreamEnd(), emulation)
    for number in (1, 300, 70_000):
        channel.send(Compute(number, 1, 2, 3, ROW, WEIGHT, evict=True))
    heard.take(3)
    ours, theirs = traffic_of(channel), traffic_of(node.streams[0].reply)
    assert ours is traffic_of(inner) is not None
    assert theirs is not None
    stamp = odmoe_pb2.ToWorker(stamp={"due": 1.5, "sent": 1.5, "machine": "x" * 36}).ByteSize()
    there, back = (sum(map(size, (1, 300, 70_000))) + 3 * stamp for size in (size_of_compute, size_of_computed))
    assert ours.sent.count_of(Compute) == theirs.received.count_of(Compute) == (3, there)
    assert ours.received.count_of(Computed) == theirs.sent.count_of(Computed) == (3, back)
    assert ours.sent.count_of(Stamped) == ours.received.count_of(Stamped) == (0, 0)
    emulation.close()


def test_in_memory_nothing_is_encoded(kit):
    assert traffic_of(inprocess.connect(EchoNode(), Recorder())) is None

"""What can go wrong between two machines: secrets, ports, peers that talk nonsense."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from itertools import count
from queue import SimpleQueue

import grpc
import pytest

from scheduler.errors import ConfigError, HandshakeError, LaunchError, LinkError, ProtocolError, SecretError
from support.nodes.streams import PATIENT, WAIT_S, Answering, EchoNode, Recorder
from wire import odmoe_pb2
from wire.messages import MAX_ENCODED_BYTES, Align, CloseRequest, Evict, Load, Loaded, Tensor
from wire.odmoe_pb2_grpc import WorkerStub
from wire.rpc import server as server_module
from wire.rpc import stream
from wire.rpc.stream import ACCEPTED_KEY, MAX_QUEUED, SERVER_OPTIONS
from wire.rpc.tls import Identity
from wire.traffic import traffic_of

ECHO = [Loaded(1, 10, 0.25)]
MAX_BYTES = 64 << 20


@contextmanager
def raw_call(address: str, metadata=()):
    """A stream past our client: returns a queue of bytes to send (None ends it) and the gRPC call."""
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        queue: SimpleQueue[bytes | None] = SimpleQueue()
        call = channel.stream_stream("/odmoe.Worker/Work")(iter(queue.get, None), metadata=metadata, timeout=WAIT_S)
        yield queue, call
        queue.put(None)


@contextmanager
def raw_server(behave):
    """A server past ours: `behave(requests, context)` is its Work and its Follow method. Yields its address."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        method = grpc.stream_stream_rpc_method_handler(behave)
        for service, name in (("odmoe.Worker", "Work"), ("odmoe.Shadow", "Follow")):
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait(WAIT_S)


def assert_serves(kit, address: str, **settings) -> None:
    heard = Recorder()
    kit.connect(address, heard, **settings).send(Load(1, 0, 0, 0))
    assert heard.take(1) == ECHO


@pytest.fixture
def identity(authority) -> Identity:
    return Identity.read(authority().folder())


# --- secrets and addresses -------------------------------------------------------------------------------------


def test_right_secret(kit):
    assert_serves(kit, kit.serve(secret="s3cret").address, secret="s3cret")


@pytest.mark.parametrize("secret", [None, "wrong", "s3cret2", "s3cre"])
def test_wrong_or_missing_secret(kit, secret):
    node, heard = EchoNode(), Recorder()
    server = kit.serve(node, secret="s3cret")
    with pytest.raises(SecretError, match=rf"the worker at {server.address} .*UNAUTHENTICATED.*same secret"):
        kit.connect(server.address, heard, secret=secret)
    assert not heard.ends
    assert not node.streams
    assert_serves(kit, server.address, secret="s3cret")


def test_wrong_secret_past_our_client(kit):
    server = kit.serve(secret="s3cret")
    with raw_call(server.address, (("odmoe-secret", "guess"),)) as (_, call):
        assert call.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("secret", ["", " s", "s ", "sécret", "two\nlines", "x" * 1025])
def test_secret_that_cannot_be(kit, secret):
    with pytest.raises(ConfigError, match="printable ASCII"):
        kit.serve(secret=secret)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "node3.example"])
def test_off_loopback_without_secret_or_certificate(kit, identity, host):
    address = f"[{host}]:4000" if ":" in host else f"{host}:4000"
    for given, missing in (
        ({}, "a secret and a certificate are"),
        ({"secret": "s3cret"}, "a certificate is"),
        ({"identity": identity}, "a secret is"),
    ):
        said = f"{host} is not a loopback address: {missing} needed there; `odmoe certs`"
        with pytest.raises(ConfigError, match=said):
            kit.serve(host=host, **given)
        with pytest.raises(ConfigError, match=said):
            kit.connect(address, Recorder(), **given)


def test_off_loopback_with_both(kit, identity):
    server = kit.serve(host="0.0.0.0", secret="s3cret", identity=identity)
    assert_serves(kit, server.address.replace("0.0.0.0", "127.0.0.1"), secret="s3cret", identity=identity)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1:", ":50", "127.0.0.1:0", "127.0.0.1:65536", "a:b"])
def test_address_that_cannot_be(kit, address):
    with pytest.raises(ConfigError, match="allowed: host:port"):
        kit.connect(address, Recorder())


def test_port_in_use(kit):
    port = kit.serve().address.rpartition(":")[2]
    with pytest.raises(LaunchError, match=rf"127\.0\.0\.1:{port}: the port is in use"):
        kit.serve(port=int(port))


def test_wrong_kind(kit):
    with pytest.raises(HandshakeError, match=r"the shadow at .*another kind"):
        kit.connect(kit.serve().address, Recorder(), kind="shadow")


def test_nobody_there(kit):
    server = kit.serve()
    server.close(0.5)
    with pytest.raises(LinkError, match=rf"cannot reach the worker at {server.address} within 0\.3 s; check"):
        kit.connect(server.address, Recorder(), deadline_s=0.3)


def test_a_node_that_comes_up_late_is_waited_for(kit):
    first = kit.serve()
    port = int(first.address.rpartition(":")[2])
    first.close(0.5)
    later = threading.Timer(0.4, lambda: kit.serve(port=port))
    later.start()
    assert_serves(kit, first.address)
    later.join(WAIT_S)


# --- nonsense on the stream ------------------------------------------------------------------------------------


def test_generated_stub_is_understood(kit):
    server = kit.serve()
    with grpc.insecure_channel(server.address) as channel:
        request = odmoe_pb2.ToWorker(load=odmoe_pb2.Load(load_id=1))
        (answer,) = WorkerStub(channel).Work(iter([request]), timeout=WAIT_S)
    assert answer.loaded.load_id == 1


def test_messages_of_one_call_travel_as_one(kit):
    """As many messages of gRPC as calls of `send`, read by protobuf alone."""
    seen: list[odmoe_pb2.ToWorker] = []

    def behave(requests, context):
        context.send_initial_metadata(((ACCEPTED_KEY, "1"),))
        for data in requests:
            seen.append(odmoe_pb2.ToWorker.FromString(data))
            if len([pb for pb in seen if pb.WhichOneof("message") != "beat"]) == 2:
                break
        yield odmoe_pb2.FromWorker(loaded={"load_id": 1}).SerializeToString()

    heard = Recorder()
    with raw_server(behave) as address:
        channel = kit.connect(address, heard)
        channel.send(Load(1, 0, 2, 3), Evict(4))
        channel.send(Load(2, 0, 2, 3))
        heard.take(1)
        assert traffic_of(channel).sent.count_of(Load).messages == 2
        channel.close()
    bundle, alone = (pb for pb in seen if pb.WhichOneof("message") != "beat")
    parts = [odmoe_pb2.ToWorker.FromString(part) for part in bundle.bundle.messages]
    assert [part.WhichOneof("message") for part in parts] == ["load", "evict"]
    assert (parts[0].load.load_id, parts[1].evict.slot, alone.load.load_id) == (1, 4, 2)


def test_messages_of_one_call_travel_alone_where_there_is_no_bundle():
    shadow = stream.EDGES["shadow"]
    sending = stream.Stream(shadow.to_node, shadow.from_node, "the shadow", lambda: None, PATIENT)
    sending.send(CloseRequest(1), CloseRequest(2))
    sending.close()
    sent = [odmoe_pb2.ToShadow.FromString(data).close_request.request for data in sending.outgoing()]
    sending.read((), Recorder())
    assert sent == [1, 2]


@pytest.mark.parametrize("inner", [{"bundle": {"messages": [b""]}}, {"beat": {"coming": 0}}])
def test_a_bundle_in_a_bundle_ends_that_stream_only(kit, inner):
    node = EchoNode()
    server = kit.serve(node)
    with raw_call(server.address) as (queue, call):
        part = odmoe_pb2.ToWorker(**inner).SerializeToString()
        queue.put(odmoe_pb2.ToWorker(bundle={"messages": [part]}).SerializeToString())
        assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "within a Bundle" in call.details()
    assert isinstance(node.streams[0].end(), ProtocolError)
    assert_serves(kit, server.address)


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"", b"\x22\x00"], ids=["garbage", "unset", "Compute, no tensors"])
def test_bad_bytes_end_that_stream_only(kit, data):
    node = EchoNode()
    server = kit.serve(node)
    with raw_call(server.address) as (queue, call):
        queue.put(odmoe_pb2.ToWorker(load=odmoe_pb2.Load(load_id=1)).SerializeToString())
        next(call)
        queue.put(data)
        assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "allowed" in call.details()
    assert isinstance(node.streams[0].end(), ProtocolError)
    assert_serves(kit, server.address)


def test_oversize_ends_that_stream_only(kit, monkeypatch):
    """With a limit below what gRPC sends ahead: the sender of more may not hear why before all of it is sent."""
    limit = "grpc.max_receive_message_length"
    assert dict(SERVER_OPTIONS)[limit] == MAX_ENCODED_BYTES
    options = tuple((name, 30_000 if name == limit else value) for name, value in SERVER_OPTIONS)
    monkeypatch.setattr(server_module, "SERVER_OPTIONS", options)
    node = EchoNode()
    server = kit.serve(node)
    with raw_call(server.address) as (queue, call):
        queue.put(bytes(30_001))
        assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert node.streams[0].end() is not None
    assert_serves(kit, server.address)


def test_bad_bytes_from_a_node(kit):
    def behave(requests, context):
        context.send_initial_metadata(((ACCEPTED_KEY, "1"),))
        yield b"\xff\xff\xff"
        next(requests, None)

    heard = Recorder()
    with raw_server(behave) as address:
        channel = kit.connect(address, heard)
        assert isinstance(heard.end(), ProtocolError)
        with pytest.raises(LinkError, match="closed"):
            channel.send(Evict(0))


def test_oversize_from_a_node(kit):
    def behave(requests, context):
        context.send_initial_metadata(((ACCEPTED_KEY, "1"),))
        yield bytes(MAX_ENCODED_BYTES + 1)
        next(requests, None)

    heard = Recorder()
    with raw_server(behave) as address:
        kit.connect(address, heard)
        assert isinstance(heard.end(), ProtocolError)


def test_a_server_that_is_not_ours(kit):
    release = threading.Event()

    def behave(requests, context):
        release.wait(2 * WAIT_S)
        yield b""

    with raw_server(behave) as address:
        with pytest.raises(LinkError, match=r"cannot reach .* within 0\.3 s"):
            kit.connect(address, Recorder(), deadline_s=0.3)
        release.set()


@pytest.mark.parametrize("error", [HandshakeError("another model"), ProtocolError("out of turn"), LinkError("full")])
def test_a_node_may_refuse_a_stream(kit, error):
    def refuse(reply):
        raise error

    with pytest.raises(type(error), match=str(error)):
        kit.connect(kit.serve(EchoNode(refuse)).address, Recorder())


@pytest.mark.parametrize(
    ("raised", "seen"),
    [(HandshakeError, HandshakeError), (ProtocolError, ProtocolError), (ValueError, LinkError)],
)
def test_a_node_may_refuse_a_message(kit, raised, seen):
    class Refusing(Answering):
        def on_message(self, message):
            raise raised("not this one")

    node, heard = EchoNode(Refusing), Recorder()
    server = kit.serve(node)
    kit.connect(server.address, heard).send(Evict(0))
    error = heard.end()
    assert isinstance(error, seen)
    assert "not this one" in str(error)
    assert isinstance(node.streams[0].end(), seen)
    node.make = Answering
    assert_serves(kit, server.address)


@contextmanager
def deaf_node():
    """A node that takes the stream and then reads nothing. Yields its address."""
    release = threading.Event()

    def behave(requests, context):
        context.send_initial_metadata(((ACCEPTED_KEY, "1"),))
        release.wait(2 * WAIT_S)
        yield from ()

    with raw_server(behave) as address:
        yield address
        release.set()


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Load(1, 0, 0, 0), f"{MAX_QUEUED} messages of 0 MiB wait"),
        (Align(1, 0, None, 0, (Tensor("uint8", (1 << 22,), bytes(1 << 22)),)), r"\d+ messages of \d+ MiB wait"),
    ],
    ids=["many", "large"],
)
def test_a_peer_that_does_not_read(kit, message, said, monkeypatch):
    monkeypatch.setattr(stream, "MAX_QUEUED_BYTES", MAX_BYTES)
    heard = Recorder()
    size = 64 if isinstance(message, Load) else 1 << 22
    with deaf_node() as address:
        edge = "worker" if isinstance(message, Load) else "shadow"
        channel = kit.connect(address, heard, kind=edge)
        sent = count()
        with pytest.raises(LinkError, match=rf"does not keep up: {said}"):
            deque((channel.send(message) for _ in zip(sent, range(200_000), strict=False)), maxlen=0)
        assert 1 < next(sent) * size <= MAX_BYTES + (16 << 20)  # and what gRPC and the kernel hold
        assert isinstance(heard.end(), LinkError)
        with pytest.raises(LinkError, match="closed"):
            channel.send(message)

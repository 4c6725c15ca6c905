"""Connects to a node that is served over gRPC."""

from __future__ import annotations

import threading
from concurrent import futures
from typing import Any

import grpc

from scheduler.errors import ConfigError, LinkError, ODMoEError
from wire.base import Channel, Handler
from wire.grpc_stream import ACCEPTED_KEY, CLIENT_OPTIONS, EDGES, SECRET_KEY, Kind, Stream, check_secret, error_of
from wire.pulse import PULSE, Pulse


def connect(
    address: str,
    kind: Kind,
    handler: Handler,
    secret: str | None = None,
    deadline_s: float = 10.0,
    credentials: grpc.ChannelCredentials | None = None,
    pulse: Pulse = PULSE,
) -> Channel:
    """Open a stream to the node at `address` ("host:port"); what it says goes to `handler`, from a thread of its own.

    Until `deadline_s` a node that is not there yet is waited for. Raises `ConfigError` for an address that cannot be or
    is off loopback without a secret, `LinkError` when the node cannot be reached, `HandshakeError` when it refuses the
    secret or is of another kind. Where this raises, `handler` hears nothing. `pulse` says when a silent node is lost.
    """
    check_secret(_host(address), secret)
    edge = EDGES[kind]
    channel = (
        grpc.secure_channel(address, credentials, options=CLIENT_OPTIONS)
        if credentials
        else grpc.insecure_channel(address, options=CLIENT_OPTIONS)
    )
    stream = Stream(edge.to_node, edge.from_node, f"the {kind} at {address}", lambda: call.cancel(), pulse)
    open_call: Any = channel.stream_stream  # without serializers, which its type stub demands: bytes as they are
    call = open_call(f"/{edge.service}/{edge.method}")(
        stream.outgoing(), metadata=((SECRET_KEY, secret),) if secret else (), wait_for_ready=True
    )
    opened: futures.Future[None] = futures.Future()
    reader = threading.Thread(
        target=_follow, args=(channel, call, stream, handler, opened), name="odmoe-read", daemon=True
    )
    reader.start()
    try:
        _await(opened, stream.peer, deadline_s)
    except BaseException:
        call.cancel()
        raise
    return stream


def _follow(channel: grpc.Channel, call: Any, stream: Stream, handler: Handler, opened: futures.Future[None]) -> None:
    """The stream's thread: whether the node took the stream, then what it says."""
    try:
        refusal = _refusal(call, stream.peer)
        if not opened.set_running_or_notify_cancel():
            return
        if refusal is not None:
            opened.set_exception(refusal)
            return
        opened.set_result(None)
        stream.read(call, handler)
    finally:
        stream.stop_writing()
        channel.close()


def _refusal(call: Any, peer: str) -> ODMoEError | None:
    """Wait for the node's first word, however long: `connect` cancels the call when it is too long."""
    if ACCEPTED_KEY in dict(call.initial_metadata() or ()):
        return None
    try:
        next(call)
    except StopIteration:
        return LinkError(f"{peer} ended the stream before it began")
    except grpc.RpcError as error:
        return error_of(error, peer)
    return LinkError(f"{peer} answers, but is no node of ours; check the address")


def _await(opened: futures.Future[None], peer: str, deadline_s: float) -> None:
    try:
        opened.result(deadline_s)
    except TimeoutError:
        if opened.cancel():
            raise LinkError(
                f"cannot reach {peer} within {deadline_s:g} s; check that it runs, that host and port are right, "
                "and that no firewall stands between"
            ) from None
        opened.result(deadline_s)  # it opened at the last moment


def _host(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"the address {address!r} cannot be; allowed: host:port, [IPv6]:port")
    return host.removeprefix("[").removesuffix("]")

"""Connects to a node that is served over gRPC."""

from __future__ import annotations

import threading
import time
from concurrent import futures
from typing import Any

from scheduler.errors import ConfigError, LinkError, ODMoEError
from wire.base import Channel, Handler, Served
from wire.rpc.pulse import PULSE, Pulse
from wire.rpc.quiet_grpc import grpc
from wire.rpc.stream import ACCEPTED_KEY, CLIENT_OPTIONS, EDGES, SECRET_KEY, Stream, check_access, error_of
from wire.rpc.tls import Identity
from wire.rpc.tls_probe import TlsProbe

PROBE_AFTER_S, PROBE_EACH_S = 0.25, 0.5
"""A stream that is not open after `PROBE_AFTER_S` is diagnosed, then every `PROBE_EACH_S` until the deadline."""


def connect(
    address: str,
    kind: Served,
    handler: Handler,
    secret: str | None = None,
    deadline_s: float = 10.0,
    identity: Identity | None = None,
    pulse: Pulse = PULSE,
) -> Channel:
    """Open a stream to the node at `address` ("host:port"); its messages go to `handler`, from a thread of their own.

    With an `identity` the node must speak TLS, with a certificate of this cluster for that address and that kind of
    node, and this host's must be a main node's, or for a stage the shadow's. A node that is not there yet may appear
    until `deadline_s`. `pulse` bounds a node's silence. Raises `ConfigError` for an invalid address, or one off
    loopback without a secret and an identity; `LinkError` if the node cannot be reached, `CertificateError` if one of
    the two rejects the other's certificate, `SecretError` if it rejects the secret, `HandshakeError` if it is a node of
    another kind. After an error `handler` is never called.
    """
    host, port = _parts(address)
    check_access(host, secret, identity)
    edge = EDGES[kind]
    if identity:
        identity.check_role(edge.caller)
        options = (*CLIENT_OPTIONS, *identity.channel_options(edge.role, host))
        channel = grpc.secure_channel(address, identity.channel_credentials(), options=options)
    else:
        channel = grpc.insecure_channel(address, options=CLIENT_OPTIONS)
    stream = Stream(edge.to_node, edge.from_node, f"the {kind} at {address}", lambda: call.cancel(), pulse)
    open_call: Any = channel.stream_stream  # Any: its type stub demands serializers, and we send bytes
    call = open_call(f"/{edge.service}/{edge.method}")(
        stream.outgoing(), metadata=((SECRET_KEY, secret),) if secret else (), wait_for_ready=True
    )
    opened: futures.Future[None] = futures.Future()
    reader = threading.Thread(
        target=_follow, args=(channel, call, stream, handler, opened), name="odmoe-read", daemon=True
    )
    reader.start()
    try:
        _await(opened, stream.peer, deadline_s, TlsProbe(host, port, identity, stream.peer, edge.role))
    except BaseException:
        call.cancel()
        raise
    return stream


def _follow(channel: grpc.Channel, call: Any, stream: Stream, handler: Handler, opened: futures.Future[None]) -> None:
    """The stream's thread: waits until the node accepts the stream, then reads it."""
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
    """Wait for the node's first answer. `connect` bounds this: it cancels the call at its deadline."""
    if ACCEPTED_KEY in dict(call.initial_metadata() or ()):
        return None
    try:
        next(call)
    except StopIteration:
        return LinkError(f"{peer} ended the stream before it began")
    except grpc.RpcError as error:
        return error_of(error, peer)
    return LinkError(f"{peer} answers, but is no node of ours; check the address")


def _await(opened: futures.Future[None], peer: str, deadline_s: float, probe: TlsProbe) -> None:
    """Wait until the stream is open. Diagnoses failures meanwhile, since gRPC retries whatever the reason."""
    end = time.monotonic() + deadline_s
    wait_s = PROBE_AFTER_S
    while (left_s := end - time.monotonic()) > 0:
        try:
            opened.result(min(wait_s, left_s))
            return
        except TimeoutError:
            wait_s = PROBE_EACH_S
        refused = probe.probe(end - time.monotonic())
        if refused is not None and opened.cancel():
            raise refused
    if opened.cancel():
        raise LinkError(
            f"cannot reach {peer} within {deadline_s:g} s; check that it runs, that host and port are right, "
            "and that no firewall stands between"
        )
    opened.result(PROBE_EACH_S)  # it opened at the last moment


def _parts(address: str) -> tuple[str, int]:
    """Raises ConfigError unless it is "host:port" or "[IPv6]:port"."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"the address {address!r} is invalid; allowed: host:port, [IPv6]:port")
    return host.removeprefix("[").removesuffix("]"), int(port)

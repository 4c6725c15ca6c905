"""Serves a node over gRPC."""

from __future__ import annotations

import contextlib
import functools
import hmac
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NoReturn

from scheduler.errors import CertificateError, HandshakeError, LaunchError, ODMoEError, SecretError
from wire.base import Handler, Node, Served
from wire.refusals import Refusals
from wire.rpc.doorman import Doorman
from wire.rpc.pulse import PULSE, Pulse
from wire.rpc.quiet_grpc import grpc
from wire.rpc.stream import (
    ACCEPTED_KEY,
    EDGES,
    LINGER_S,
    SECRET_KEY,
    SERVER_OPTIONS,
    Stream,
    check_access,
    metadata_of,
    status_of,
)
from wire.rpc.tls import Identity, not_for, roles_in
from wire.sessions import MAX_STREAMS

MAX_CALLS = 4 * MAX_STREAMS
"""RPCs at a time: the node's streams, and those that have just been refused or ended."""


class _Threads(futures.ThreadPoolExecutor):
    """A daemon thread for each stream: a pool's threads would keep the process alive until every peer has gone."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        done: futures.Future[Any] = futures.Future()

        def work() -> None:
            try:
                fn(*args, **kwargs)
            finally:
                done.set_result(None)

        threading.Thread(target=work, name="odmoe-write", daemon=True).start()
        return done


class GrpcServer:
    """Serves a node at `address` ("host:port") from construction to `close`, which does not close the node.

    With an `identity`, which must be a `kind`'s, it speaks only TLS, and only to clients with a main node's certificate
    of the same CA; a stage's is a shadow's, and so are those of its clients. A refused client is logged at WARNING on
    the logger `wire`, with the error that the client gets. Raises `ConfigError` off loopback without a secret or an
    identity, `CertificateError` for another kind's identity, `LaunchError` when it cannot listen.
    """

    def __init__(
        self,
        node: Node,
        kind: Served,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: str | None = None,
        identity: Identity | None = None,
        pulse: Pulse = PULSE,
    ) -> None:
        check_access(host, secret, identity)
        if identity:
            identity.check_role(EDGES[kind].role)
        self._node, self._edge = node, EDGES[kind]
        self._secret, self._identity = secret, identity
        self._pulse = pulse
        self._refusals = Refusals()
        self._doorman = Doorman(identity, self._refusals) if identity else None
        self._lock = threading.Lock()
        self._live: dict[Stream, threading.Thread] = {}
        behaviour: Any = functools.partial(self._serve)
        behaviour.experimental_non_blocking = True  # replies by a function, callable from any thread
        handler = grpc.stream_stream_rpc_method_handler(behaviour)
        service = grpc.method_handlers_generic_handler(self._edge.service, {self._edge.method: handler})
        self._server = grpc.server(
            _Threads(), handlers=[service], options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS
        )
        credentials = identity.server_credentials(self._doorman.knock) if identity and self._doorman else None
        self.address = _listen(self._server, kind, host, port, credentials)
        if self._doorman:
            self._doorman.port = int(self.address.rpartition(":")[2])
        self._server.start()

    def close(self, grace: float = 2.0) -> None:
        """Stop listening and end every stream in order; cut those still open after `grace` seconds."""
        deadline = time.monotonic() + grace + 1.0
        with self._lock:
            live = dict(self._live)
        if self._doorman:
            self._doorman.close()
        for stream in live:
            stream.close()
        self._server.stop(grace).wait(grace + 1.0)
        for reader in live.values():
            if reader is not threading.current_thread():
                reader.join(max(0.0, deadline - time.monotonic()))

    def _serve(
        self, requests: Iterator[bytes], context: grpc.ServicerContext, respond: Callable[[bytes | None], None]
    ) -> None:
        """Serves one stream until it ends. Queued replies are written in this thread."""
        if self._doorman:
            self._doorman.welcome(context.peer())
        self._check_role(context)
        self._authenticate(context)
        edge, peer = self._edge, f"the client at {context.peer()}"
        stream = Stream(edge.from_node, edge.to_node, peer, context.cancel, self._pulse, respond)
        try:
            handler = self._node.accept(stream)
        except ODMoEError as error:
            self._refuse(context, error)
        with contextlib.suppress(grpc.RpcError):  # the client has gone; the reader finds that out
            context.send_initial_metadata(((ACCEPTED_KEY, "1"),))  # before the reader's thread may answer
        self._start_reader(stream, requests, context, handler)
        for data in stream.outgoing():
            respond(data)
        if stream.fault is not None:
            code, details = status_of(stream.fault)
            context.set_code(code)
            context.set_details(details)
            context.set_trailing_metadata(metadata_of(stream.fault))
        respond(None)

    def _start_reader(
        self, stream: Stream, requests: Iterator[bytes], context: grpc.ServicerContext, handler: Handler
    ) -> None:
        def read() -> None:
            stream.read(_until_over(requests, context, stream), handler)
            with self._lock:
                del self._live[stream]

        reader = threading.Thread(target=read, name="odmoe-read", daemon=True)
        with self._lock:
            self._live[stream] = reader
        reader.start()

    def _check_role(self, context: grpc.ServicerContext) -> None:
        """Only a main node opens streams, or to a stage the shadow: any other host of the cluster has a certificate,
        and the secret, too."""
        if self._identity is None or self._identity.roles is None:
            return
        seen: Any = context.auth_context()  # grpc's own types have its values as numbers
        roles = roles_in(name.decode(errors="replace") for name in seen.get("peer_dns", ()))
        caller = self._edge.caller
        if caller not in roles:
            self._refuse(context, CertificateError(f"the certificate of {context.peer()} {not_for(caller, roles)}"))

    def _authenticate(self, context: grpc.ServicerContext) -> None:
        if self._secret is None:
            return
        given = dict(context.invocation_metadata()).get(SECRET_KEY, "")
        if not hmac.compare_digest(str(given).encode(), self._secret.encode()):
            self._refuse(context, SecretError(f"the secret is {'wrong' if given else 'missing'}"))

    def _refuse(self, context: grpc.ServicerContext, error: ODMoEError) -> NoReturn:
        if isinstance(error, HandshakeError):
            self._refusals.say(context.peer(), error)
        context.set_trailing_metadata(metadata_of(error))
        context.abort(*status_of(error))


def _until_over(requests: Iterator[bytes], context: grpc.ServicerContext, stream: Stream) -> Iterator[bytes]:
    """The client's messages. Raises `RpcError` if it is gone, which `requests` alone may take for a close."""
    over = threading.Event()
    if not context.add_callback(over.set):
        over.set()
    yield from requests
    stream.stop_writing()
    if not over.wait(LINGER_S):
        stream.cut()
    yield from requests


def _listen(server: grpc.Server, kind: Served, host: str, port: int, credentials: grpc.ServerCredentials | None) -> str:
    """Bind; returns "host:port"."""
    shown = f"[{host}]" if ":" in host else host
    try:
        where = f"{shown}:{port}"
        bound = server.add_secure_port(where, credentials) if credentials else server.add_insecure_port(where)
    except RuntimeError as error:
        raise LaunchError(
            f"a {kind} cannot listen at {shown}:{port}: the port is in use, or {host} is not an address of this "
            f"machine; choose another port, or 0 for any ({error})"
        ) from None
    return f"{shown}:{bound}"

"""What both ends of a gRPC stream share: settings, the secret, errors as status codes, and the stream itself."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from scheduler import errors
from scheduler.errors import (
    ClusterError,
    ConfigError,
    HandshakeError,
    LinkError,
    ODMoEError,
    ProtocolError,
    SecretError,
)
from wire import codec, runtime
from wire.base import Handler, Role, Served
from wire.bounds.check import GENERAL
from wire.bounds.table import MAX_BUNDLED
from wire.codec import Codec
from wire.messages import MAX_ENCODED_BYTES, Beat, Bundle, Message
from wire.rpc.outbox import Outbox
from wire.rpc.pulse import Monitor, Pulse
from wire.rpc.quiet_grpc import grpc
from wire.rpc.tls import Identity
from wire.traffic import MessageCounts, Traffic, kind_of

MAX_QUEUED = 4096
"""Messages that may wait to be written to one stream."""

MAX_QUEUED_BYTES = 512 * 1024 * 1024
"""Bytes that may wait to be written to one stream: a prompt's KV rows, say, on their way to the shadow."""

BUNDLE_BYTES = 1024 * 1024
"""Messages travel as one up to this size."""

LINGER_S = 5.0
"""How long a closed stream may take to deliver its queue before it is cut."""

SECRET_KEY = "odmoe-secret"
ACCEPTED_KEY = "odmoe-accepted"
"""In the server's first metadata: the secret was right and the node took the stream."""

ERROR_KEY = "odmoe-error"
"""In the server's last metadata: the class name of the error that ended the stream."""


log = logging.getLogger(__name__)


class Edge(NamedTuple):
    """One kind of node: its gRPC method, and what goes to it and comes from it."""

    service: str
    method: str
    to_node: Codec
    from_node: Codec
    role: Role
    """That its host's certificate has to be for."""
    caller: Literal["main", "shadow"] = "main"
    """The role of the hosts that may open streams to it."""


EDGES: dict[Served, Edge] = {
    "worker": Edge("odmoe.Worker", "Work", codec.TO_WORKER, codec.FROM_WORKER, "worker"),
    "shadow": Edge("odmoe.Shadow", "Follow", codec.TO_SHADOW, codec.FROM_SHADOW, "shadow"),
    "stage": Edge("odmoe.Stage", "Run", codec.TO_STAGE, codec.FROM_STAGE, "shadow", caller="shadow"),
}

_OPTIONS = (
    # A ping waits behind data: a shorter timeout cuts links of 50 Mbit/s in the middle of a large message.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 5000),
    # Without it a frozen peer is noticed only after a minute, whatever the keepalive says.
    ("grpc.http2.ping_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", MAX_ENCODED_BYTES),
    ("grpc.max_send_message_length", MAX_ENCODED_BYTES),
)
SERVER_OPTIONS = (
    *_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    # Otherwise a second server silently binds the same port.
    ("grpc.so_reuseport", 0),
)
CLIENT_OPTIONS = (
    *_OPTIONS,
    # Each stream has a connection of its own, so that neither a large message nor a failure of one delays another.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


# --- who may speak -------------------------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Names are not resolved: all but localhost count as remote."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_access(host: str, secret: str | None, identity: Identity | None) -> None:
    """Raises `ConfigError` for a secret that does not fit into a header, or if one of both is missing off loopback.

    The certificate proves a host's address, the secret that it belongs to this cluster.
    """
    if secret is not None and not (
        secret.isascii() and secret.isprintable() and secret.strip() == secret and 0 < len(secret) <= 1024
    ):
        raise ConfigError(
            f"a secret of {len(secret)} characters cannot be used; "
            "allowed: 1 to 1024 printable ASCII characters, no space at either end"
        )
    if is_loopback(host):
        return
    missing = [what for what, it in (("a secret", secret), ("a certificate", identity)) if it is None]
    if missing:
        raise ConfigError(
            f"{host} is not a loopback address: {' and '.join(missing)} {'are' if missing[1:] else 'is'} needed there; "
            "`odmoe certs` makes both for every host of a cluster"
        )


# --- errors as status codes ------------------------------------------------------------------------------------

_CODE_OF: tuple[tuple[type[ODMoEError], grpc.StatusCode], ...] = (
    (ProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (SecretError, grpc.StatusCode.UNAUTHENTICATED),
    (HandshakeError, grpc.StatusCode.FAILED_PRECONDITION),
    (LinkError, grpc.StatusCode.UNAVAILABLE),
)
_ERROR_OF: dict[grpc.StatusCode, type[ODMoEError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: ProtocolError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ProtocolError,
    grpc.StatusCode.UNAUTHENTICATED: SecretError,
    grpc.StatusCode.FAILED_PRECONDITION: HandshakeError,
    grpc.StatusCode.UNIMPLEMENTED: HandshakeError,
}
_ADVICE = {
    grpc.StatusCode.UNAUTHENTICATED: "; give both nodes the same secret",
    grpc.StatusCode.UNIMPLEMENTED: "; a node of another kind, or another program, listens there",
    grpc.StatusCode.UNAVAILABLE: "; check that the node still runs and that the network holds",
}


def status_of(error: ODMoEError) -> tuple[grpc.StatusCode, str]:
    """The status and details that end a stream because of `error`; `metadata_of` carries its class name."""
    code = next((code for cls, code in _CODE_OF if isinstance(error, cls)), grpc.StatusCode.INTERNAL)
    return code, str(error)[:1000]


def metadata_of(error: ODMoEError) -> tuple[tuple[str, str], ...]:
    return ((ERROR_KEY, type(error).__name__),)


def error_of(error: grpc.RpcError, peer: str) -> ODMoEError:
    """A stream's gRPC error as one of ours. The server's side of a stream has no status."""
    if not isinstance(error, grpc.Call):
        return LinkError(f"the stream to {peer} broke: the peer is gone, or gave it up")
    code = error.code()
    cause = f"ended with {code.name}: {error.details()}"
    if code is grpc.StatusCode.CANCELLED:  # gRPC says no more
        cause = "was ended by the other side without a word: its process is ending, or another main node took its place"
    description = f"the stream to {peer} {cause}{_ADVICE.get(code, '')}"
    error_class = getattr(errors, str(dict(error.trailing_metadata() or ()).get(ERROR_KEY, "")), None)
    if isinstance(error_class, type) and issubclass(error_class, ClusterError):
        return error_class(description)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "Concurrent RPC" in (error.details() or ""):
        return LinkError(f"{peer} has as many streams as it can take; others may end soon: connect again")
    return _ERROR_OF.get(code, LinkError)(description)


# --- the stream ------------------------------------------------------------------------------------------------


class Stream:
    """A `Channel` over one gRPC stream. Messages are queued, encoded, for the thread in which gRPC writes.

    `cut` ends the RPC at once, from any thread, even if it has ended. `write`, if given, writes a message from any
    thread, one at a time, and returns when gRPC has taken it.
    """

    def __init__(
        self,
        out: Codec,
        into: Codec,
        peer: str,
        cut: Callable[[], object],
        pulse: Pulse,
        write: Callable[[bytes], object] | None = None,
    ) -> None:
        self.peer = peer
        self.fault: ODMoEError | None = None  # what ended the stream, if that happened on this side
        self.cut = cut
        self.traffic = Traffic(MessageCounts(), MessageCounts())
        self._out, self._into = out, into
        self._pulse = pulse
        self._monitor = Monitor(pulse, self._beat, self._silent)
        self._outbox = Outbox(MAX_QUEUED, MAX_QUEUED_BYTES, write)
        self._closed = False  # nothing more is sent
        self._ended_here = False  # by `close`, for falling behind, or for silence
        self._linger: runtime.Timer | None = None

    def send(self, *messages: Message) -> None:
        """Raises `LinkError` if the stream is closed or its queue full, `ProtocolError` if encoding fails: then none of
        the messages is sent."""
        if self._closed:
            raise LinkError(f"the stream to {self.peer} is closed; connect again")
        every = [self._out.encode(message) for message in messages]
        size = sum(map(len, every))
        together = self._out.carries(Bundle) and 1 < len(every) <= MAX_BUNDLED and size <= BUNDLE_BYTES
        bundle = self._out.encode(Bundle(tuple(every))) if together else None
        for message, data in zip(messages, every, strict=True):
            self.traffic.sent.add(kind_of(message), len(data))
        for data in [bundle] if bundle else every:
            self._put(data)

    def _put(self, data: bytes) -> None:
        self._monitor.sent_since_wakeup = True
        if len(data) <= self._pulse.announced_bytes:
            taken = self._outbox.put(data)
        else:
            taken = self._outbox.put(self._out.encode(Beat(len(data))), data)
        if not taken:
            raise self._cut_for(
                LinkError(f"{self.peer} does not keep up: {self._outbox.waiting()}; the stream was cut")
            )

    def close(self) -> None:
        """End the stream after delivering the queue, within `LINGER_S`. Messages that still arrive are dropped."""
        if self._closed:
            return
        self._closed = self._ended_here = True
        self._linger = runtime.Timer(LINGER_S, self.cut)
        self._linger.daemon = True
        self._linger.start()
        self._outbox.end()

    def outgoing(self) -> Iterator[bytes]:
        """What gRPC writes, until the stream is closed or over."""
        return iter(self._outbox)

    def stop_writing(self) -> None:
        """Release the thread that waits in `outgoing`."""
        self._closed = True
        self._outbox.end()

    def read(self, incoming: Iterable[bytes], handler: Handler) -> None:
        """Pass messages to `handler` until the stream ends, then call its `on_close`. Returns after that."""
        self._monitor.start()
        error = self._pump(incoming, handler)
        self._monitor.stop()
        self.fault = error
        self.stop_writing()
        if self._linger is not None:
            self._linger.cancel()
        try:
            handler.on_close(error)
        except Exception:
            log.exception("on_close failed for the stream to %s", self.peer)

    def _pump(self, incoming: Iterable[bytes], handler: Handler) -> ODMoEError | None:
        monitor = self._monitor
        try:
            for data in incoming:
                if self._closed:
                    continue
                message = self._into.decode(data)
                if isinstance(message, Beat | Bundle):
                    GENERAL.check(message)
                if isinstance(message, Beat):
                    monitor.hear(message.coming)
                    continue
                monitor.hear()
                monitor.busy = True
                for part in message.messages if isinstance(message, Bundle) else ():
                    if self._closed:
                        break
                    self._deliver(self._into.decode(part), len(part), handler)
                if not isinstance(message, Bundle):
                    self._deliver(message, len(data), handler)
                monitor.busy = False
        except grpc.RpcError as error:
            return self.fault if self._ended_here else error_of(error, self.peer)
        except ODMoEError as error:
            return error
        except Exception as error:
            log.exception("on_message failed for the stream to %s", self.peer)
            return LinkError(f"handling a message of {self.peer} failed: {error!r}; the stream was ended")
        return self.fault

    def _deliver(self, message: Message, nbytes: int, handler: Handler) -> None:
        if isinstance(message, Bundle | Beat):
            raise ProtocolError(f"{self.peer} sent a {type(message).__name__} within a Bundle")
        self.traffic.received.add(kind_of(message), nbytes)
        handler.on_message(message)

    def _beat(self) -> None:
        if not self._closed and self._outbox.idle():  # a queued message is a sign of life, too
            self._outbox.put(self._out.encode(Beat(0)), at_once=False)

    def _silent(self) -> None:
        if self._closed:
            self.cut()
            return
        self._cut_for(
            LinkError(
                f"{self.peer} has been silent for {self._pulse.lost_after_s:g} s, not even a beat came: it is frozen, "
                "or gone, or the network does not hold; the stream was cut"
            )
        )

    def _cut_for(self, fault: LinkError) -> LinkError:
        self._closed = self._ended_here = True
        self.fault = fault
        self.cut()
        return fault

"""Diagnoses, on the server's side, why a TLS handshake failed, and with which client.

gRPC tells a server nothing about a rejected client, and the client only that the connection was closed. But for each
new connection it requests the server's certificate before it reads a byte. After a failed handshake, Python's `ssl`
serves the caller's next connection, with the same certificates and rules. It reports the reason here, and sends the
caller the alert that gRPC withholds. That connection is always closed afterwards.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from urllib.parse import unquote

from scheduler.errors import CertificateError
from wire.refusals import MAX_CALLERS, QUIET_S, Refusals
from wire.rpc.tls import NO_CERTIFICATE, NO_TLS, Identity, ours_wrong, theirs_wrong

EXAMINE_S = 0.25
"""Limit of one examination, which needs some milliseconds. It blocks gRPC's thread and with it new connections."""

SPEND_S = 1.0
"""Within `QUIET_S` no examination starts once they have taken so long, so that no caller can block the others."""

GIVEN_UP_S = 3.0
"""A caller that opened no stream and did not reconnect for so long is reported without an examination."""

COME_AGAIN = b"\0\0\x08\x07" + bytes(13)
"""An HTTP/2 GOAWAY frame, sent to a caller that passed its examination. gRPC then retries (it expects SETTINGS first),
and any answer tells `tls_probe` that its certificate is not at fault."""

log = logging.getLogger("wire")

Peer = tuple[str, int]
"""Address and port of a connection's other end."""


class _Caller:
    """One address that has connected and opened no stream yet."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.explained = False
        self.failed = False  # its last connection ended without a stream: examine the next
        self.left = False  # at least one connection ended so


class Doorman:
    """The doorman of one server. gRPC calls `knock` for each new connection, the server `welcome` for each stream.

    `knock` must not raise. It returns None, so that gRPC keeps its certificate.
    """

    def __init__(self, identity: Identity, refusals: Refusals) -> None:
        self.port = 0  # known once the server listens
        self._identity = identity
        self._refusals = refusals
        self._open: dict[Peer, bool] = {}  # connections, and whether each had a stream or was examined
        self._callers: dict[str, _Caller] = {}
        self._spent: list[tuple[float, float]] = []  # when an examination ended, and how long it took
        self._timer: threading.Timer | None = None
        self._closed = False
        self._lock = threading.Lock()

    def knock(self) -> None:
        chosen, suspect = None, None
        try:
            connections = dict(_connections(self.port))
            with self._lock:
                new = [peer for peer in connections if peer not in self._open]
                self._sort_out(connections)
                chosen = next((peer for peer in new if self._suspects(peer[0])), None)
                if chosen:
                    self._open[chosen] = True
                    suspect = connections.pop(chosen)
            _let_go(connections)
            if chosen and suspect:
                self._examine(chosen[0], suspect)
        except OSError as error:  # no file descriptor is left, for example: gRPC decides alone
            log.warning("a new connection to port %d cannot be looked at: %s", self.port, error)

    def welcome(self, peer: str) -> None:
        """A stream was opened by `peer`, as gRPC names it ("ipv4:127.0.0.1:4000", "ipv6:[::1]:4000")."""
        host, _, port = unquote(peer).partition(":")[2].rpartition(":")
        address = _plain(host.strip("[]"))
        with self._lock:
            self._open[address, int(port) if port.isdigit() else 0] = True
            self._callers.pop(address, None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()

    def _sort_out(self, connections: dict[Peer, socket.socket]) -> None:
        """Update the callers: new ones, and those whose connection ended without a stream. Holds the lock."""
        now = time.monotonic()
        for peer in [peer for peer in self._open if peer not in connections]:
            if not self._open.pop(peer) and peer[0] in self._callers:
                self._callers[peer[0]].failed = self._callers[peer[0]].left = True
        self._callers = {address: caller for address, caller in self._callers.items() if now - caller.since < QUIET_S}
        for peer in connections:
            self._open.setdefault(peer, False)
            if not self._open[peer] and len(self._callers) < MAX_CALLERS:
                self._callers.setdefault(peer[0], _Caller())
        if self._callers and self._timer is None and not self._closed:
            self._timer = threading.Timer(GIVEN_UP_S, self._report)
            self._timer.daemon = True
            self._timer.start()

    def _suspects(self, address: str) -> bool:
        """Whether to examine it: its handshake failed, and time is left to find out why. The lock is held."""
        now = time.monotonic()
        self._spent = [(at, seconds) for at, seconds in self._spent if now - at < QUIET_S]
        caller = self._callers.get(address)
        return caller is not None and caller.failed and sum(seconds for _, seconds in self._spent) < SPEND_S

    def _examine(self, address: str, connection: socket.socket) -> None:
        """Do a TLS handshake with a caller as gRPC would, and log why it fails."""
        start = time.monotonic()
        connection.settimeout(EXAMINE_S)
        reason, fine = "", False
        try:
            with self._identity.as_server.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            ) as secured:
                try:
                    secured.do_handshake()
                    fine = True
                    secured.sendall(COME_AGAIN)
                except ssl.SSLError as error:
                    reason = _in_words(error)
                finally:
                    secured.shutdown(socket.SHUT_RDWR)  # for gRPC, too, it is over
        except OSError:  # it hung up, or took too long: no reason is known
            pass
        with self._lock:
            self._spent.append((time.monotonic(), time.monotonic() - start))
            caller = self._callers.get(address)
            if caller is not None:
                caller.explained = caller.explained or bool(reason)
                caller.failed = not fine
        if reason:
            self._refusals.say(address, CertificateError(reason))

    def _report(self) -> None:
        """Report callers that gRPC rejected and that did not reconnect. Runs `GIVEN_UP_S` after a first connection."""
        try:
            connections = dict(_connections(self.port))
        except OSError:
            connections = None
        with self._lock:
            self._timer = None
            if connections is None:
                return
            _let_go(connections)
            self._sort_out(connections)
            lost = [address for address, caller in self._callers.items() if caller.left and not caller.explained]
            for address in lost:
                self._callers[address].explained = True
        for address in lost:
            self._refusals.say(
                address,
                CertificateError(
                    "it connects and leaves without opening a stream: it has no certificate of this cluster, or one "
                    "that has expired, or does not accept this host's; make both again with `odmoe certs`"
                ),
            )


def _in_words(error: ssl.SSLError) -> str:
    reason = theirs_wrong(error)
    if reason in (NO_TLS, NO_CERTIFICATE):
        return f"{reason}, which is demanded here; give it this cluster's certificates (`odmoe certs`)"
    if reason:
        return f"{reason} ({_today()}); renew that host's certificate with `odmoe certs`"
    against = ours_wrong(error)
    return f"it does not take this host's certificate: {against}; renew it with `odmoe certs`" if against else ""


def _today() -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC here", time.gmtime())


def _let_go(connections: dict[Peer, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()


def _connections(port: int) -> Iterator[tuple[Peer, socket.socket]]:
    """This process's connections to `port`, each as a duplicated handle, which the caller must close."""
    for name in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            handle = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        peer = _peer(handle, port)
        if peer is None:
            handle.close()
        else:
            yield peer, handle


def _peer(connection: socket.socket, port: int) -> Peer | None:
    """The other end of a connection whose own end is `port`."""
    try:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != port:
            return None
        host, far = connection.getpeername()[:2]
    except OSError:  # it listens, or the other end has gone
        return None
    return _plain(host), far


def _plain(host: str) -> str:
    """An IPv4 address in its own notation, even if mapped into IPv6."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)

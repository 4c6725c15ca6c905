"""Diagnoses, on the client's side, why a stream does not open: gRPC reports only "Socket closed" and retries."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from typing import Any

from scheduler.errors import CertificateError
from wire.base import Role
from wire.rpc.tls import (
    NO_TLS,
    Identity,
    dates_wrong,
    is_for,
    not_for,
    ours_wrong,
    roles_of,
    same_host,
    theirs_wrong,
)

LOOK_S = 1.0
"""How long one look may take."""

CLOSED_S = 0.05
"""After this time a node has noticed a closed connection."""

_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
"""An HTTP/2 client's first bytes: a node that accepts us answers, another one closes."""

_RENEW = "renew it with `odmoe certs`, copy it to that host and restart the node"
_RENEW_OURS = "renew it with `odmoe certs`, copy it here and start again"


class TlsProbe:
    """A probe of the node at `host` and `port`, called `peer` in messages, with the certificates that gRPC uses."""

    def __init__(self, host: str, port: int, identity: Identity | None, peer: str, role: Role = "worker") -> None:
        self._host, self._port = host, port
        self._role = role
        self._name = identity.called_name(role, host) if identity else host
        self._identity = identity
        self._peer = peer
        self._cut_off = 0  # consecutive handshakes that the node cut without an alert

    def probe(self, left_s: float) -> CertificateError | None:
        """None if no node answers, or if the certificates are right. Each of at most four connections is limited by
        `left_s` and `LOOK_S`."""
        try:
            reason = self._probe(max(0.05, min(LOOK_S, left_s)))
        except OSError:  # no node there, or too slow; one that starts may be both
            self._cut_off = 0
            return None
        return CertificateError(reason) if reason else None

    def _probe(self, timeout_s: float) -> str:
        identity = self._identity
        try:
            with (
                self._connect(timeout_s) as plain,
                _context(identity).wrap_socket(plain, server_hostname=self._name) as secured,
            ):
                if identity is None:
                    return self._it_wants_tls()
                secured.sendall(_HELLO)
                if secured.recv(1):
                    self._cut_off = 0
                    return ""
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError, BrokenPipeError):
            pass
        except ssl.SSLError as error:
            return self._in_words(error, timeout_s)
        if identity is None:
            return ""
        self._cut_off += 1
        if self._cut_off < 3:
            return ""
        return (
            f"{self._peer} hangs up during the TLS handshake and does not say why: it takes this host's certificate "
            f"for expired or another cluster's, or is no node of ours; {_RENEW_OURS}"
        )

    def _connect(self, timeout_s: float) -> socket.socket:
        return socket.create_connection((self._host, self._port), timeout_s)

    def _in_words(self, error: ssl.SSLError, timeout_s: float) -> str:
        if self._identity is None:
            return self._it_wants_tls() if ours_wrong(error) else ""
        theirs = theirs_wrong(error)
        if theirs == NO_TLS:
            return f"{self._peer} speaks no TLS; start it with this cluster's certificates (`odmoe certs`)"
        if theirs:
            return f"refused {self._peer}: {self._details(theirs, self._identity, timeout_s)}; {_RENEW}"
        ours = ours_wrong(error)
        return f"{self._peer} refuses this host's certificate: {ours}; {_RENEW_OURS}" if ours else ""

    def _details(self, reason: str, identity: Identity, timeout_s: float) -> str:
        """Which date or which address is wrong. Connects once more, since a rejected certificate cannot be read.

        Before that it rejects the node twice more, for the node's own log, which diagnoses a caller only after a first
        failure.
        """
        for _ in range(2):
            time.sleep(CLOSED_S)
            with contextlib.suppress(OSError), self._connect(timeout_s) as plain:
                identity.as_client.wrap_socket(plain, server_hostname=self._name).close()
        try:
            with self._connect(timeout_s) as plain, identity.as_reader.wrap_socket(plain) as secured:
                found: Any = secured.getpeercert()
        except OSError:
            return reason
        wrong = dates_wrong(found)
        if wrong:
            return f"its certificate {wrong}"
        names, roles = is_for(found), roles_of(found)
        if not any(same_host(name, self._host) for name in names):
            return f"its certificate is for {', '.join(names) or 'no address'}, not for {self._host}"
        if identity.roles is not None and self._role not in roles:
            return f"its certificate {not_for(self._role, roles)}"
        return reason

    def _it_wants_tls(self) -> str:
        return (
            f"{self._peer} speaks TLS only, and this host has no certificate; make one with `odmoe certs`, copy it here"
        )


def _context(identity: Identity | None) -> ssl.SSLContext:
    if identity is not None:
        return identity.as_client
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # only to see whether the node speaks TLS
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context

"""Checks the first message of a stream: same protocol, same model, same dtype."""

from __future__ import annotations

import logging

from scheduler.errors import HandshakeError, ModelMismatchError, VersionError
from wire.messages import PROTOCOL_VERSION, Hello

log = logging.getLogger("wire")

_STORE = "give both the same store"


def check_hello(hello: Hello, node: str, fingerprint: str, dtype: str, peer: str = "") -> None:
    """Raises VersionError or ModelMismatchError naming what differs between the caller and `node`.

    `peer` is the caller's address. A refusal is also logged here, at WARNING on the logger `wire`.
    """
    error = _difference(hello, node, fingerprint, dtype)
    if error is not None:
        log.warning("%s: refused %s: %s", type(error).__name__, peer or hello.node, error)
        raise error


def _difference(hello: Hello, node: str, fingerprint: str, dtype: str) -> HandshakeError | None:
    kinds: tuple[tuple[type[HandshakeError], str, object, object, str], ...] = (
        (VersionError, "protocol version", hello.version, PROTOCOL_VERSION, "install the same odmoe on both hosts"),
        (ModelMismatchError, "model fingerprint", hello.fingerprint, fingerprint, _STORE),
        (ModelMismatchError, "dtype", hello.dtype, dtype, _STORE),
    )
    for kind, what, theirs, ours, advice in kinds:
        if theirs != ours:
            return kind(f"{node} has {what} {ours}, {hello.node} has {theirs}; {advice}")
    return None

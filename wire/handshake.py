"""Checks the first message of a stream: same protocol, same model, same dtype."""

from __future__ import annotations

from scheduler.errors import HandshakeError, ModelMismatchError, VersionError
from wire.messages import PROTOCOL_VERSION, Hello
from wire.refusals import Refusals

_STORE = "give both the same store"


def check_hello(
    hello: Hello, node: str, fingerprint: str, dtype: str, peer: str = "", refusals: Refusals | None = None
) -> None:
    """Raises VersionError or ModelMismatchError naming what differs between the caller and `node`.

    `peer` is the caller's address. A refusal is also logged, by the node's `refusals`.
    """
    error = _difference(hello, node, fingerprint, dtype)
    if error is not None:
        (refusals or Refusals()).say(peer or hello.node, error)
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

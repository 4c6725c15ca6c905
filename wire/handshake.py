"""The first message of a stream: do the two nodes belong together?"""

from __future__ import annotations

from scheduler.errors import HandshakeError
from wire.messages import PROTOCOL_VERSION, Hello


def check_hello(hello: Hello, node: str, fingerprint: str, dtype: str) -> None:
    """Raises HandshakeError naming what differs between the caller and `node`."""
    for what, theirs, ours in (
        ("protocol version", str(hello.version), str(PROTOCOL_VERSION)),
        ("model fingerprint", hello.fingerprint, fingerprint),
        ("dtype", hello.dtype, dtype),
    ):
        if theirs != ours:
            raise HandshakeError(f"{node} has {what} {ours}, {hello.node} has {theirs}; give both the same store")

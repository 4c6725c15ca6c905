"""A node that does not belong: tries a worker in every wrong way, on a host of the cluster.

Run there by scripts.testbed.ten_hosts in its step `refusals`: `python stranger.py HOST:PORT KEYS EXPIRED`, where KEYS
is that host's own directory of keys, and EXPIRED one with a certificate of the same authority that is over. Prints JSON
lines: what was tried, and the error that came.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from scheduler.errors import ODMoEError
from wire import messages as w
from wire.rpc.client import connect
from wire.rpc.tls import _CLIENT, _SERVER, Identity, _context, _lenient


class Listener:
    """Keeps the first thing that is said, or that ended the stream."""

    def __init__(self) -> None:
        self.heard: str | None = None

    def on_message(self, message: w.Message) -> None:
        said = f"{message.error}: {message.message}" if isinstance(message, w.Failed) else type(message).__name__
        self.heard = self.heard or said

    def on_close(self, error: ODMoEError | None) -> None:
        self.heard = self.heard or f"{type(error).__name__}: {error}"


def unread(folder: Path) -> Identity:
    """An identity that was not looked at, as ours would be: what a stranger's program does."""
    ca, chain, key = (folder / name for name in ("ca.pem", "node.pem", "node.key"))
    client, server = (_context(kind, ca, chain, key) for kind in (_CLIENT, _SERVER))
    reader = _lenient(_context(_CLIENT, ca, chain, key))
    return Identity(ca.read_bytes(), chain.read_bytes(), key.read_bytes(), 0.0, client, server, reader)


def attempt(address: str, identity: Identity, secret: str, hello: w.Hello) -> str:
    listener = Listener()
    try:
        channel = connect(address, "worker", listener, secret=secret, identity=identity, deadline_s=10.0)
        channel.send(hello)
        end = time.monotonic() + 10
        while listener.heard is None and time.monotonic() < end:
            time.sleep(0.05)
        channel.close()
    except ODMoEError as error:
        return f"{type(error).__name__}: {error}"
    return listener.heard or "nothing was said"


def main() -> None:
    address, keys, expired = sys.argv[1], Path(sys.argv[2]).expanduser(), Path(sys.argv[3]).expanduser()
    identity, secret = Identity.read(keys), (keys / "secret").read_text().strip()
    ours = w.Hello(w.PROTOCOL_VERSION, "another model", "float32", "a stranger")
    older = w.Hello(w.PROTOCOL_VERSION - 1, "another model", "float32", "a stranger")
    cases = {
        "a wrong secret": (identity, "guessed", ours),
        "an expired certificate": (unread(expired), secret, ours),
        "another protocol version": (identity, secret, older),
        "another model's store": (identity, secret, ours),
    }
    for name, case in cases.items():
        print(json.dumps({"tried": name, "heard": attempt(address, *case)}), flush=True)
    time.sleep(2)  # so that the other side has looked into what failed


if __name__ == "__main__":
    main()

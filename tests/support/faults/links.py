"""A link that fails: a relay between two ends of a TCP connection, on loopback, in user space.

No packet is lost for good within a TCP stream, so a lossy link is one that stops now and then, and a cut one holds what
it has until it is mended or one of the ends gives up.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time

CHUNK = 1 << 14
RETRANSMISSION_S = 0.2
"""What a lost packet costs on Linux, at least."""


class Relay:
    """Listens at `address` and passes on to `target` ("host:port"), for any number of connections."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.loss = {"there": 0.0, "back": 0.0}
        """Share of chunks that wait for a retransmission, by direction: to the target, and from it."""
        self.bytes_per_s: float | None = None
        self._open = {"there": threading.Event(), "back": threading.Event()}
        for way in self._open.values():
            way.set()
        self._draw = random.Random(0)
        self._sockets: list[socket.socket] = []
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def cut(self, *ways: str) -> None:
        """As a cable that is pulled: nothing passes any more, and neither end hears of it. `ways`: `there`, `back`, or
        both where none is named."""
        for way in ways or self._open:
            self._open[way].clear()

    def mend(self) -> None:
        for way in self._open.values():
            way.set()

    def close(self) -> None:
        self._closed = True
        self.mend()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # `close` alone does not wake `accept`
        self._listener.close()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), name="relay-serve", daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        self._open["there"].wait()  # no connection is made through a cut link
        host, _, port = self.target.rpartition(":")
        try:
            far = socket.create_connection((host, int(port)), timeout=5)
        except OSError:
            near.close()
            return
        far.settimeout(None)
        self._sockets += [near, far]
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        other = threading.Thread(target=self._pump, args=(far, near, "back"), name="relay-back", daemon=True)
        other.start()
        self._pump(near, far, "there")
        other.join()
        for end in (near, far):
            self._sockets.remove(end)
            end.close()

    def _pump(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while data := source.recv(CHUNK):
                if self._draw.random() < self.loss[way]:
                    time.sleep(RETRANSMISSION_S)
                if self.bytes_per_s:
                    time.sleep(len(data) / self.bytes_per_s)
                self._open[way].wait()
                sink.sendall(data)
        except OSError:
            pass
        self._open[way].wait()
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

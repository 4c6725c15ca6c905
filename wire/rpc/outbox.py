"""What waits to be written to one stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue


class Outbox:
    """Encoded messages, in the order in which they were put; thread-safe, bounded in number and in bytes.

    `write`, where there is one, writes a message at once and returns when gRPC has taken it. A small message that
    nothing waits before is then written by the thread that sends it, which spares a wake-up of the thread that
    drains the outbox; it waits for gRPC, and so for the peer only where the link is full.
    """

    AT_ONCE_BYTES = 128 * 1024
    """Larger messages are not written at once: they may not fit the peer's window, and the sender must not wait."""

    def __init__(self, max_messages: int, max_bytes: int, write: Callable[[bytes], object] | None = None) -> None:
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._write = write
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._count = self._bytes = 0
        self._counting = threading.Lock()
        self._writing = threading.Lock()

    def put(self, *messages: bytes, at_once: bool = True) -> bool:
        """Messages that follow each other. False, with nothing done, where it is full; an empty outbox takes all."""
        if at_once and self._put_at_once(messages):
            return True
        size = sum(map(len, messages))
        with self._counting:
            full = self._count + len(messages) > self._max_messages or self._bytes + size > self._max_bytes
            if full and self._count:
                return False
            self._count += len(messages)
            self._bytes += size
            for data in messages:
                self._queue.put(data)
        return True

    def _put_at_once(self, messages: tuple[bytes, ...]) -> bool:
        if self._write is None or len(messages) > 1 or len(messages[0]) > self.AT_ONCE_BYTES:
            return False
        if not self._writing.acquire(blocking=False):
            return False
        try:
            if self._count:
                return False
            self._write(messages[0])
            return True
        finally:
            self._writing.release()

    def idle(self) -> bool:
        """Nothing waits."""
        return not self._count

    def waiting(self) -> str:
        return f"{self._count} messages of {self._bytes / 2**20:.0f} MiB wait"

    def end(self) -> None:
        """What was put before is still given out."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[bytes]:
        """What gRPC is to write next, until `end`. For one thread."""
        for data in iter(self._queue.get, None):
            with self._writing:
                yield data
            with self._counting:
                self._count -= 1
                self._bytes -= len(data)

"""The queue of messages to be written to one stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wire import runtime


class Outbox:
    """A queue of encoded messages, bounded in number and in bytes. Thread-safe.

    `write`, if given, writes a message at once and returns when gRPC has taken it. A small message then skips an empty
    queue and is written by the sending thread, which saves a wake-up of the draining thread. The sender waits for gRPC,
    and for the peer only if the link is full.
    """

    AT_ONCE_BYTES = 128 * 1024
    """Larger messages are always queued: they may not fit the peer's window, and the sender must not block."""

    def __init__(self, max_messages: int, max_bytes: int, write: Callable[[bytes], object] | None = None) -> None:
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._write = write
        self._queue: runtime.SimpleQueue[bytes | None] = runtime.SimpleQueue()
        self._count = self._bytes = 0
        self._counting = runtime.Lock()
        self._writing = runtime.Lock()

    def put(self, *messages: bytes, at_once: bool = True) -> bool:
        """Queue consecutive messages. False, with nothing queued, if full; an empty outbox accepts any size."""
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
        """Whether the queue is empty."""
        return not self._count

    def waiting(self) -> str:
        return f"{self._count} messages of {self._bytes / 2**20:.0f} MiB wait"

    def end(self) -> None:
        """End the iteration after the messages that are already queued."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[bytes]:
        """The messages for gRPC to write, until `end`. For one thread."""
        for data in iter(self._queue.get, None):
            with self._writing:
                yield data
            with self._counting:
                self._count -= 1
                self._bytes -= len(data)

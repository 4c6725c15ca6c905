"""The checksum of an expert's bytes, made while they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checkpoint.manifest import RunningChecksum
from wire import runtime

TAIL_BYTES = 4 << 20
"""The last piece of a load that is checked, where its size can be chosen: only its digest has to be waited for."""


class Digests:
    """Makes digests, and has the thread on which they take the pieces that another follows. The thread starts with the
    first of those."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: runtime.ThreadPoolExecutor | None = None

    def new(self) -> BlobDigest:
        return BlobDigest(self)

    def submit(self, add: Callable[[Any], None], piece: Any) -> runtime.Future[None]:
        if self._thread is None:
            self._thread = runtime.ThreadPoolExecutor(1, self._name)
        return self._thread.submit(add, piece)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


class BlobDigest:
    """xxh3-128 of a blob whose pieces come one after the other, as they are loaded. A piece that another follows is
    taken on another thread, while the next one is on its way."""

    def __init__(self, digests: Digests) -> None:
        self._waited_s = self._beside_s = 0.0
        self._digests = digests
        self._checksum = RunningChecksum()
        self._last: runtime.Future[None] | None = None

    @property
    def seconds(self) -> float:
        """What it has cost: the time by which it lengthened the load, and that of the other thread, whose core a
        computation may have needed."""
        return self._waited_s + self._beside_s

    def add(self, piece: Any, more: bool) -> None:
        """The next piece: a buffer, which keeps its bytes until `hex` was called."""
        start = runtime.perf_counter()
        if more:
            self._last = self._digests.submit(self._add_beside, piece)
        else:
            if self._last is not None:
                self._last.result()
            self._checksum.add(piece)
        self._waited_s += runtime.perf_counter() - start

    def _add_beside(self, piece: Any) -> None:
        start = runtime.perf_counter()
        self._checksum.add(piece)
        self._beside_s += runtime.perf_counter() - start

    def hex(self) -> str:
        """Once the last piece has been added."""
        return self._checksum.hex()

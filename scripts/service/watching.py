"""What a server holds while clients come and go: memory over time, and what is left behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scripts.service.server import ServerProcess

SETTLE_S = 30.0
"""Longest wait for what the last requests have left."""
QUIET_S = 6.0
"""The engine's thread of steps ends when it has had nothing to do for 5 s."""
PERIOD_S = 0.1


class MemoryWatch:
    """Resident memory, every `period_s`. `size`: in bytes; None: there is nothing to look at any more."""

    def __init__(self, size: Callable[[], int | None], period_s: float = 1.0) -> None:
        self._size, self._period_s = size, period_s
        self.samples: list[tuple[float, int]] = []
        """(seconds since the beginning, bytes)."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def _watch(self) -> None:
        began = time.monotonic()
        while (found := self._size()) is not None:
            self.samples.append((time.monotonic() - began, found))
            if self._ended.wait(self._period_s):
                return

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def facts(self) -> dict[str, Any]:
        """Bytes: at first, at most, at last; and growth a minute by least squares, over the second half."""
        later = self.samples[len(self.samples) // 2 :]
        return {
            "rss_first": self.samples[0][1],
            "rss_most": max(size for _, size in self.samples),
            "rss_last": self.samples[-1][1],
            "rss_growth_a_minute": 60.0 * slope(later),
            "rss_watched_s": self.samples[-1][0],
        }


def slope(points: list[tuple[float, int]]) -> float:
    """By least squares; 0 of fewer than two points."""
    if len(points) < 2:
        return 0.0
    x, y = (sum(column) / len(points) for column in zip(*points, strict=True))
    spread = sum((a - x) ** 2 for a, _ in points)
    return sum((a - x) * (b - y) for a, b in points) / spread if spread else 0.0


@dataclass(frozen=True, slots=True)
class Held:
    """What a server has at a quiet moment."""

    requests: float
    threads: int
    files: int


async def held(server: ServerProcess, baseline: Held | None = None) -> Held:
    """Once no request is left and there are no more threads and files than in the `baseline`, or after `SETTLE_S`.
    Without a baseline: after some quiet seconds, in which the server ends what it ends when it has nothing to do."""
    if baseline is None:
        await asyncio.sleep(QUIET_S)
    end = time.monotonic() + SETTLE_S
    while True:
        requests = sum(await asyncio.to_thread(server.open_requests))
        found = Held(requests, server.threads(), server.files())
        more = baseline is not None and (found.threads > baseline.threads or found.files > baseline.files)
        if not (requests or more) or time.monotonic() > end:
            return found
        await asyncio.sleep(PERIOD_S)


def left(before: Held, after: Held) -> dict[str, Any]:
    """What is there now and was not before."""
    return {
        "requests_left": after.requests,
        "threads_more": after.threads - before.threads,
        "files_more": after.files - before.files,
    }

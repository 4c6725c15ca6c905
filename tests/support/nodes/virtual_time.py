"""Time of the engine that passes only while it waits and no node has anything left to do: no test waits for it."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from support.nodes.engine_world import Desk


class VirtualTime:
    """Of one desk, from construction on: where the engine waits for a layer or for a node's word, the fakes finish what
    they do; then the clock jumps to what is next, an action of `after` or the end of the wait.

    For tests in which only fakes and actions bring about what is waited for: nobody else's doing is waited for.
    """

    def __init__(self, desk: Desk, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self._desk = desk
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        clock = SimpleNamespace(monotonic=lambda: self.now, Condition=lambda: _Condition(self))
        patch.setattr("main_node.engine.owed_answers.runtime", clock)
        patch.setattr("main_node.engine.peer.runtime", clock)
        patch.setattr("wire.lent_threads.LentThreads.run_until", lambda _, done, within_s: self.wait(done, within_s))

    def after(self, seconds: float, action: Callable[..., object], *args: Any) -> None:
        """In the waiting thread, `seconds` from now."""
        heapq.heappush(self._agenda, (self.now + seconds, next(self._numbers), lambda: action(*args)))

    def wait(self, ready: Callable[[], object], timeout: float | None) -> bool:
        end = self.now + timeout if timeout is not None else float("inf")
        while True:
            self._desk.settle()
            if ready():
                return True
            if not self._agenda or self._agenda[0][0] > end:
                assert end < float("inf"), "nothing would ever end this wait"
                self.now = max(self.now, end)
                return False
            self.now, _, action = heapq.heappop(self._agenda)
            action()


class _Condition(threading.Condition):
    def __init__(self, time: VirtualTime) -> None:
        super().__init__()
        self._time = time

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """The fakes need the lock to say what is waited for."""
        self.release()
        try:
            self._time.wait(predicate, timeout)
        finally:
            self.acquire()
        return predicate()

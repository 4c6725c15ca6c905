"""Brings lost nodes back."""

from __future__ import annotations

import logging
from collections.abc import Callable

from main_node.engine.engine import Engine
from scheduler.errors import WrongOutputError
from wire import runtime
from wire.base import Role

STEADY_S = 60.0
"""A loss is forgotten after each so many seconds of service."""
MOST_DOUBLINGS = 5
"""How often the first pause doubles: a node that is lost again and again costs requests a small share of their time."""
HURRY_S = 0.1
"""Pause where requests wait for a worker."""

_log = logging.getLogger(__name__)


class Reconnector:
    """Tries to connect every lost node until it is back or the cluster is closed: one thread a node. The pauses between
    its attempts double from `first_s` to `most_s`. They last no longer than `HURRY_S` while `hurried()`. The first
    pause is at least as long as requests have waited for the node in vain, `wasted_s(kind, number)`, and doubles with
    each loss that is not forgotten.

    `join(kind, number)` is one attempt. It connects the node to the engine or raises, within its own deadline, and soon
    after `closing` is set.
    """

    def __init__(
        self,
        join: Callable[[Role, int], None],
        first_s: float = 0.5,
        most_s: float = 3.0,
        hurried: Callable[[], bool] = lambda: False,
        wasted_s: Callable[[Role, int], float] = lambda kind, number: 0.0,
    ) -> None:
        self.closing = runtime.Event()
        self._join = join
        self._first_s, self._most_s = first_s, most_s
        self._hurried = hurried
        self._wasted_s = wasted_s
        self._lock = runtime.Lock()
        self._missing: dict[tuple[Role, int], bool] = {}  # True: lost since its last attempt began
        self._returned: dict[tuple[Role, int], float] = {}  # when
        self._losses: dict[tuple[Role, int], int] = {}  # that are not forgotten
        self._threads: set[runtime.Thread] = set()
        self._refused: set[tuple[Role, int]] = set()  # of which that was logged

    def on_lost(self, kind: Role, number: int) -> None:
        """A node is gone. Returns at once."""
        node = (kind, number)
        with self._lock:
            if self.closing.is_set():
                return
            trying = node in self._missing
            self._missing[node] = True
            if trying:
                return
            thread = runtime.Thread(target=self._bring_back, args=node, name=f"rejoin-{kind}-{number}", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _bring_back(self, kind: Role, number: int) -> None:
        node = (kind, number)
        pause_s = self._first_pause_s(node)
        if pause_s > self._most_s:
            _log.warning("%s %d was lost too often or was silent: it is tried again in %g s", kind, number, pause_s)
        while not self._pause(pause_s):
            with self._lock:
                self._missing[node] = False
            joined = self._attempt(kind, number)
            with self._lock:
                if joined and not self._missing[node]:
                    del self._missing[node]
                    self._returned[node] = runtime.monotonic()
                    break
            pause_s = self._longer(pause_s)
        with self._lock:
            self._threads.discard(runtime.current_thread())

    def _first_pause_s(self, node: tuple[Role, int]) -> float:
        """Of this loss, which is counted."""
        losses, served_s = self._losses.get(node, 0), runtime.monotonic() - self._returned.get(node, 0.0)
        while losses and served_s > STEADY_S:
            losses, served_s = losses - 1, served_s - STEADY_S
        self._losses[node] = losses + 1
        return max(self._first_s, self._wasted_s(*node)) * 2.0 ** min(losses, MOST_DOUBLINGS)

    def _pause(self, pause_s: float) -> bool:
        """True when closed meanwhile."""
        while pause_s > 0:
            if self.closing.wait(min(pause_s, HURRY_S)):
                return True
            pause_s = 0.0 if self._hurried() else pause_s - HURRY_S
        return self.closing.is_set()

    def _attempt(self, kind: Role, number: int) -> bool:
        try:
            self._join(kind, number)
        except WrongOutputError as error:
            level = logging.DEBUG if (kind, number) in self._refused else logging.WARNING
            self._refused.add((kind, number))
            _log.log(level, "%s %d is not taken back: %s", kind, number, error)
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, the next attempt may succeed
            _log.info("%s %d is not back: %r", kind, number, error)
            return False
        self._refused.discard((kind, number))
        _log.warning("%s %d is back", kind, number)
        return True

    def _longer(self, pause_s: float) -> float:
        return min(2 * pause_s, self._most_s)

    def close(self, deadline_s: float = 2.0) -> None:
        """Stop trying."""
        with self._lock:
            self.closing.set()
            threads = list(self._threads)
        end = runtime.monotonic() + deadline_s
        for thread in threads:
            thread.join(max(0.0, end - runtime.monotonic()))


def keep_connected(engine: Engine, deadline_s: float) -> Reconnector:
    """Brings the engine's nodes back when they are lost, as they were connected before. `deadline_s`: of an attempt.
    Close it before the engine."""
    peers = engine.peers

    def join(kind: Role, number: int) -> None:
        connect = peers.connects[kind, number]
        if kind == "worker":
            peers.add_worker(number, connect, deadline_s)
        else:
            peers.add_shadow(connect, deadline_s)

    made = Reconnector(join, hurried=engine.waiting, wasted_s=peers.wasted_s)
    peers.on_lost = made.on_lost
    return made

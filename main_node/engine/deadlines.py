"""Deadlines that no waiting thread watches: of workers that are missing, and of predictions that the shadow owes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from main_node.engine.peers import Peers
from scheduler import types as t
from scheduler.core.machine import MAX_FAILURES, Core
from scheduler.errors import DeadlineError
from wire import runtime

_log = logging.getLogger(__name__)
LOOK_S = 0.1
"""Between two looks while a request is open."""
IDLE_S = 5.0
"""The thread ends when no request has been open for so long; the next one starts it again."""
READING = 2.0
"""The shadow may read a prompt for so many times as long as the main node did."""


class Watched(Protocol):
    """The engine."""

    core: Core
    peers: Peers

    def post(self, event: t.Event) -> None: ...


class Deadlines:
    """Time is counted in looks, not by the clock: after a look that came late, no more than twice `LOOK_S` has passed.
    So a main node that was itself stopped gives the others time to come back.

    Methods are called with the engine's lock held.
    """

    def __init__(
        self,
        engine: Watched,
        lock: runtime.RLock,
        worker_wait_s: float,
        shadow_s: float,
        answer_s: float = 30.0,
    ) -> None:
        """`worker_wait_s`: how long open requests wait for workers that are missing. `shadow_s`: how long a shadow may
        owe predictions and send none. `answer_s`: how long a worker may owe answers and give none."""
        self.worker_wait_s = worker_wait_s
        self.answer_s = answer_s
        self.shadow_s = shadow_s
        self.waited_s = 0.0
        """How long requests have waited for missing workers so far. May be read from any thread."""
        self.silent = False
        """The shadow was lost for its silence, and has sent no prediction since, though it may be back."""
        self._engine = engine
        self._lock = lock
        self._thread: runtime.Thread | None = None
        self._closed = runtime.Event()
        self._missing: set[int] = set()
        """Workers that were lost and are not back."""
        self._short_s = 0.0
        """How long workers have been missing since a layer last made progress."""
        self._stalled_s = 0.0
        """How long a layer has waited for experts since it last made progress."""
        self._progress = 0
        """`Core.progress` at the last look."""
        self._losses: Counter[int] = Counter()
        """How often each worker was lost since then."""
        self._patience = 1.0
        """By how much a shadow may be silent for longer. Doubles with each loss, so that one that reads a prompt slowly
        gets to its end at some time."""
        self._owed_s = 0.0
        """How long the shadow has owed predictions since it sent one."""
        self._logged = ""
        """The last error that was logged."""
        self._opened: dict[int, float] = {}
        """Open request -> when it was opened."""
        self._reading_s: dict[int, float] = {}
        """Open request -> seconds until its first token."""
        self._handlers: dict[type, Callable[[Any], None]] = {
            t.WorkerLost: self._on_worker_lost,
            t.WorkerJoined: self._on_worker_joined,
            t.RequestOpened: self._on_request_opened,
            t.RequestClosed: self._on_request_closed,
            t.TokenDecoded: self._on_token_decoded,
            t.Predicted: self._on_predicted,
            t.ShadowJoined: self._on_shadow_joined,
        }

    @property
    def short(self) -> bool:
        """Workers are missing: those that are connected cannot compute every expert."""
        return self._engine.core.shortfall is not None

    def close(self) -> None:
        """No worker will come any more: every open request fails."""
        self._closed.set()
        self.worker_wait_s = 0.0
        self._expire_at_once()

    def join(self) -> None:
        """Wait for the end of the thread, after `close`, for at most a few looks. Not with the engine's lock held."""
        thread = self._thread
        if thread is not None and thread is not runtime.current_thread():
            thread.join(20 * LOOK_S)

    # --- events -------------------------------------------------------------------------------------------------

    def on_handled(self, event: t.Event, now: float, commands: list[t.Command]) -> None:
        """See `Observer`."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    @property
    def stall_s(self) -> float:
        """A layer that gets nothing new for so long ends its request: as long as its workers may be missing, and one
        after the other may be silent."""
        return self.worker_wait_s + MAX_FAILURES * self.answer_s

    def _on_worker_lost(self, event: t.WorkerLost) -> None:
        self._missing.add(event.worker)
        self._losses[event.worker] += 1
        self._expire_at_once()

    def _on_worker_joined(self, event: t.WorkerJoined) -> None:
        self._missing.discard(event.worker)
        self._note_progress()

    def _on_request_opened(self, event: t.RequestOpened) -> None:
        self._opened[event.request] = runtime.monotonic()
        self._expire_at_once()
        if self._thread is None and not self._closed.is_set():
            self._thread = runtime.Thread(target=self._run, name="odmoe-deadlines", daemon=True)
            self._thread.start()

    def _on_request_closed(self, event: t.RequestClosed) -> None:
        self._opened.pop(event.request, None)
        self._reading_s.pop(event.request, None)
        if not self._opened:
            self._short_s = 0.0

    def _on_token_decoded(self, event: t.TokenDecoded) -> None:
        if event.index == 0 and event.request in self._opened:
            self._reading_s[event.request] = runtime.monotonic() - self._opened[event.request]

    def _on_predicted(self, event: t.Predicted) -> None:
        self._patience = 1.0
        self._owed_s = 0.0
        self.silent = False

    def _on_shadow_joined(self, event: t.ShadowJoined) -> None:
        self._owed_s = 0.0

    # --- expiry -------------------------------------------------------------------------------------------------

    def _expire_at_once(self) -> None:
        if self._opened and self.short and (not self.worker_wait_s or self._nobody_comes_back()):
            self._expire()

    def _nobody_comes_back(self) -> bool:
        """All that are missing gave wrong outputs: only other processes could take their places."""
        return bool(self._missing) and self._missing <= self._engine.peers.banned_workers()

    def _expire(self) -> None:
        reason = self._reason()
        self._short_s = 0.0
        self._losses.clear()
        self._engine.post(t.WorkerWaitExpired(reason))

    def _reason(self) -> str:
        reason = self._engine.core.shortfall or ""
        if not self.worker_wait_s:
            return reason
        names = [f"worker {number}" for number in sorted(self._missing)] or ["a worker"]
        if self._nobody_comes_back():
            return (
                f"{reason}; {', '.join(names)} gave wrong outputs and {'are' if names[1:] else 'is'} not taken back: "
                f"check {'those machines' if names[1:] else 'that machine'}, and restart the workers"
            )
        again = max(self._losses.values(), default=0) > 1
        lost = f" or was lost again ({self._lost_often()})" if again else ""
        return (
            f"{reason}; {', '.join(names)} did not come back within {self.worker_wait_s:g} s{lost}: start "
            f"{'them' if names[1:] else 'it'} again, or wait longer with --worker-wait"
        )

    def _lost_often(self) -> str:
        times = [f"worker {number} {count} time{'s' * (count > 1)}" for number, count in sorted(self._losses.items())]
        return "lost meanwhile: " + (", ".join(times) or "no worker")

    # --- time ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        idle_s, looked = 0.0, runtime.monotonic()
        while not self._closed.wait(LOOK_S):
            before, looked = looked, runtime.monotonic()
            passed_s = min(looked - before, 2 * LOOK_S)
            silent: DeadlineError | None = None
            with self._lock:
                shadow = self._engine.peers.shadow
                if self._opened:
                    idle_s = 0.0
                    silent = self._check(passed_s, shadow is not None)
                else:
                    idle_s += passed_s
                if idle_s >= IDLE_S:
                    self._thread = None
                    return
            if shadow is not None and silent is not None:
                self._engine.peers.lose_shadow(shadow, silent)

    def _check(self, passed_s: float, shadowed: bool) -> DeadlineError | None:
        try:
            self._check_workers(passed_s)
            return self._check_shadow(passed_s) if shadowed else None
        except Exception as error:  # noqa: BLE001 - a dead thread would leave requests waiting for ever
            if repr(error) != self._logged:  # it may come at every look
                self._logged = repr(error)
                _log.exception("a deadline could not be kept")
            return None

    def _note_progress(self) -> None:
        """Waiting begins anew where a layer has got something new, or nothing waits; not where workers come and go."""
        core = self._engine.core
        if core.progress != self._progress or not (self.short or core.awaits_experts):
            self._progress = core.progress
            self._short_s = self._stalled_s = 0.0
            self._losses.clear()

    def _check_workers(self, passed_s: float) -> None:
        self._note_progress()
        if self._engine.core.awaits_experts:
            self._stalled_s += passed_s
        if self.short:
            self.waited_s += passed_s
            self._short_s += passed_s
            if self._short_s >= self.worker_wait_s:
                self._expire()
        elif self._stalled_s >= self.stall_s:
            self._stalled_s = 0.0
            self._engine.post(
                t.RequestsStalled(
                    f"its layer waits for experts, and for {self.stall_s:g} s none was loaded or computed "
                    f"({self._lost_often()}); look into the workers' logs"
                )
            )

    def _check_shadow(self, passed_s: float) -> DeadlineError | None:
        """Returns an error where it has been silent for too long."""
        owed = sum(stats.unmatched_count for stats in self._engine.core.stats.values())
        if not owed:
            return None
        self._owed_s += passed_s
        allowed_s = self._patience * (self.shadow_s + READING * max(self._reading_s.values(), default=0.0))
        if self._owed_s < allowed_s:
            return None
        self._owed_s = 0.0
        self._patience *= 2
        self.silent = True
        return DeadlineError(f"it owes the predictions of {owed} layers and has sent none for {allowed_s:.3g} s")

"""What the search for periods of alignment is told of the steps, and the periods that it wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scheduler import types as t
from scheduler.alignment import AUTO, FIXED, Alignment
from scheduler.core.state import Request
from scheduler.core.stats import RequestStats
from scheduler.periods.search import Periods, PeriodSearch


class LivePeriods:
    """Measures steps that only decode, from their start to the last answer of a worker: what clients take to ask for
    the next token is no part of them. `load_s`: seconds that a load takes.

    New periods are those of all requests from the same step on, so that their alignments are due together. That step is
    not measured.
    """

    def __init__(self, alignment: Alignment, load_s: Callable[[], float]) -> None:
        self._search: PeriodSearch | None = None
        if alignment.tuning != FIXED:
            first = alignment.token_period, alignment.kv_period
            self._search = PeriodSearch(first, alignment.tuning == AUTO)
        self._load_s = load_s
        self.periods: Periods | None = self.best
        """Those to use in this step; None: they are fixed."""
        self._shadow = False
        self._began = self._ended = 0.0
        self._step: dict[int, tuple[int, RequestStats]] = {}
        """Request -> the token of its answer that its pass begins with, and its figures."""
        self._waiting: set[int] = set()
        """Requests of the step whose tokens have not come."""
        self._gained = self._reloads = 0
        self._stall_s = 0.0

    @property
    def best(self) -> Periods | None:
        """The best ones so far, whatever is being tried."""
        return self._search.used if self._search is not None else None

    def begin(self, passes: Mapping[int, t.Pass], requests: Mapping[int, Request], now: float) -> None:
        """A step begins."""
        if self._search is None:
            return
        self._began, self._ended, self._gained, self._step = now, now, 0, {}
        changed, self.periods = self.periods != self._search.periods, self._search.periods
        if self._shadow and not changed and not any(one.prefill for one in passes.values()):
            for number, one in passes.items():
                stats = requests[number].stats
                self._step[number] = one.position - stats.prompt_tokens, stats
        self._waiting = set(self._step)
        self._stall_s, self._reloads = self._sums()

    def disturbed(self) -> None:
        """The workers have changed: the step under way says nothing."""
        self._waiting.clear()

    def shadow_changed(self, present: bool) -> None:
        """The shadow has come, or is lost."""
        self._shadow = present
        self.disturbed()
        if self._search is not None:
            self._search.interrupt()

    def computed(self, now: float) -> None:
        """A worker has answered."""
        self._ended = now

    def decoded(self, request: int, index: int) -> None:
        """Token `index` of a request's answer exists."""
        if self._search is None or request not in self._waiting:
            return
        self._waiting.discard(request)
        self._gained += index - self._step[request][0]
        if self._waiting:
            return
        stall_s, reloads = self._sums()
        count = len(self._step)
        self._search.stepped(
            count,
            self._gained / count,
            self._ended - self._began,
            (stall_s - self._stall_s) / count,
            (reloads - self._reloads) * self._load_s(),
        )

    def _sums(self) -> tuple[float, int]:
        """Stalls and loads on demand of the step's requests so far."""
        of_all = [stats for _, stats in self._step.values()]
        return sum(stats.stall_s for stats in of_all), sum(stats.reloads for stats in of_all)

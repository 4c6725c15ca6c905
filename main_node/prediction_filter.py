"""How far the shadow may be ahead: predictions beyond that, of unknown requests, or without end are dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from scheduler import types as t
from scheduler.errors import ProtocolError

REPEATS = 8
"""Predictions of one layer of a pass, on average: passes are repeated when an alignment differs."""

STRAYS = 1000
"""Predictions of no use before the shadow is lost, beside those that may have been on their way when a request was
closed."""


@dataclass(slots=True)
class Window:
    """What the shadow may predict of one request: positions [first, stop)."""

    first: int
    stop: int
    announced: int = -1
    """The last decode pass that the shadow was told to start."""
    drafts: int = 0
    """Passes that it may be ahead of that one to draft, at most so far."""
    taken: int = 0
    """Predictions of use."""
    drafted: int = 0
    """Drafts of use."""


class Predictable(Protocol):
    """A request that the shadow may predict."""

    window: Window


class PredictionFilter:
    """`requests`: those that are open. `lookahead`: passes that the shadow may be ahead of the last one announced.
    `layers`: that have gates.

    Predictions come from one thread at a time; the rest is called with the engine's lock.
    """

    def __init__(self, requests: Mapping[int, Predictable], lookahead: int, layers: int) -> None:
        self.dropped = 0
        """Predictions of no use so far."""
        self._lookahead = lookahead
        self._layers = layers
        self._requests = requests
        self._strays = 0

    def on_announced(self, request: int, step: int, drafts: int = 0) -> None:
        """The shadow is told that decode pass `step` may start, and so many after it to draft."""
        mine = self._window(request)
        if mine is not None:
            mine.announced = max(mine.announced, step)
            mine.drafts = max(mine.drafts, drafts)

    def on_closed(self) -> None:
        """A request is no longer open: what was on its way for it is of no use any more."""
        self._strays = 0

    def _window(self, request: int) -> Window | None:
        found = self._requests.get(request)
        return None if found is None else found.window

    def takes(self, prediction: t.Predicted) -> bool:
        """Whether it is of use. Raises ProtocolError for one of too many that are not."""
        mine = self._window(prediction.request)
        if mine is not None and self._fits(mine, prediction.position):
            mine.taken += 1
            return True
        self._drop(f"predictions of no use, the last one for position {prediction.position}", prediction.request)
        return False

    def takes_draft(self, request: int, step: int) -> bool:
        """Whether a draft of the token of decode pass `step` is of use. As `takes`."""
        mine = self._window(request)
        if mine is not None and mine.drafts:
            ahead = max(self._lookahead, mine.drafts)
            most = REPEATS * (mine.announced + ahead + 2) * (1 + ahead)
            if step <= mine.announced + ahead + 1 and mine.drafted < most:
                mine.drafted += 1
                return True
        self._drop(f"drafts of no use, the last one for decode pass {step}", request)
        return False

    def _drop(self, what: str, request: int) -> None:
        self.dropped += 1
        self._strays += 1
        ahead = max([self._lookahead, *(one.window.drafts for one in list(self._requests.values()))])
        if self._strays > STRAYS + REPEATS * self._layers * (ahead + 2):
            strays, self._strays = self._strays, 0  # the next shadow may be another
            raise ProtocolError(f"it has sent {strays} {what} of request {request}; it may be {ahead} passes ahead")

    def _fits(self, mine: Window, position: int) -> bool:
        ahead = max(self._lookahead, mine.drafts)
        reached = mine.first + mine.announced + ahead
        passes = mine.announced + ahead + 2
        if mine.drafts:  # after each wrong draft what was ahead is run again
            passes *= 1 + ahead
        in_reach = mine.first <= position <= reached and position < mine.stop
        return in_reach and mine.taken < REPEATS * self._layers * passes

"""A recorded log through a fresh scheduler, by the simulator's heap: does it decide the same?"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import zip_longest

from scheduler.build import make_core
from scheduler.errors import ConfigError
from scheduler.eventlog.recording import Recording


@dataclass(frozen=True, slots=True)
class Replayed:
    """How many events and commands were compared, and the first difference in words; None: identical, in order."""

    events: int
    commands: int
    difference: str | None

    def __str__(self) -> str:
        difference = self.difference or "identical, in order"
        return f"{self.events} events, {self.commands} commands: {difference}"


def replay(recording: Recording) -> Replayed:
    """Tell a new core what the recorded one was told, at the same times. Raises ConfigError where no scheduler could
    have been told that, or it was told nothing: that would be identical whatever it does."""
    core = make_core(recording.core_config)
    heap = [(now, number, event) for number, (now, event) in enumerate(recording.events)]
    heapq.heapify(heap)
    compared = 0
    while heap:
        now, number, event = heapq.heappop(heap)
        try:
            decided = core.handle(event, now)
        except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
            where = f"event {number + 1} of the recording, {event}"
            raise ConfigError(f"{where}, cannot have happened ({error!r})") from error
        recorded = recording.commands[number]
        for place, (mine, was) in enumerate(zip_longest(decided, recorded), 1):
            if mine != was:
                difference = f"command {place} was {was or 'none'}, and is {mine or 'none'} here"
                return Replayed(number + 1, compared, f"after event {number + 1}, {event}, {difference}")
            compared += 1
    if not compared:
        raise ConfigError(f"the recording has {len(recording.events)} events and no command; nothing can be compared")
    return Replayed(len(recording.events), compared, None)

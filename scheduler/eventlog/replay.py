"""Replays a recording: feeds its events to a new scheduler and compares the commands."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import zip_longest

from scheduler.build import make_core
from scheduler.core.machine import Core
from scheduler.core.state import InconsistentStateError
from scheduler.errors import ConfigError
from scheduler.eventlog.recording import Recording

_CONTRADICTION = "the scheduler's books contradict each other"


@dataclass(frozen=True, slots=True)
class Replayed:
    """The numbers of events and commands that were compared, and the first difference in words. None: identical."""

    events: int
    commands: int
    difference: str | None

    def __str__(self) -> str:
        difference = self.difference or "identical, in order"
        return f"{self.events} events, {self.commands} commands: {difference}"


def replay(recording: Recording, validate: bool = False) -> Replayed:
    """Feed the recorded events to a new core, at their times, and compare its commands with the recorded ones.
    `validate`: check the core's books after each event, too. Raises ConfigError if the events are impossible, or if
    there is no command to compare."""
    if recording.foreign:
        raise ConfigError(
            f"the recording is of a system with {', '.join(recording.foreign)}, which is not here, so its decisions "
            "cannot be made again; give the file that has it with --policy-file, or simulate its routes (--routes) "
            "with another --system"
        )
    core = make_core(recording.core_config)
    heap = [(now, number, event) for number, (now, event) in enumerate(recording.events)]
    heapq.heapify(heap)
    compared = 0
    while heap:
        now, number, event = heapq.heappop(heap)
        try:
            decided = core.handle(event, now)
        except InconsistentStateError as error:
            return Replayed(number + 1, compared, f"after event {number + 1}, {event}, {_CONTRADICTION}: {error}")
        except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
            where = f"event {number + 1} of the recording, {event}"
            raise ConfigError(f"{where}, cannot have happened ({error!r})") from error
        recorded = recording.commands[number]
        for place, (mine, was) in enumerate(zip_longest(decided, recorded), 1):
            if mine != was:
                difference = f"command {place} was {was or 'none'}, but now is {mine or 'none'}"
                return Replayed(number + 1, compared, f"after event {number + 1}, {event}, {difference}")
            compared += 1
        if validate and (contradiction := _contradiction(core)):
            return Replayed(number + 1, compared, f"after event {number + 1}, {event}, {contradiction}")
    if not compared:
        raise ConfigError(f"the recording has {len(recording.events)} events and no command; nothing can be compared")
    return Replayed(len(recording.events), compared, None)


def _contradiction(core: Core) -> str:
    """In the books of the core, in words; empty: none."""
    try:
        core.validate()
    except InconsistentStateError as error:
        return f"{_CONTRADICTION}: {error}"
    return ""

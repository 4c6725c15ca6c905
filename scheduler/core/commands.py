"""The outbox: every command of the core is made here, in the order in which it must be carried out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from scheduler import types as t
from scheduler.core.state import Demand, SlotEntry


class Commands:
    """What the event that is being handled has led to so far."""

    __slots__ = ("_commands", "_ids")

    def __init__(self) -> None:
        self._commands: list[t.Command] = []
        self._ids = itertools.count(1)

    def next_id(self) -> int:
        """For a demand, a load or a call; ascending, never used twice."""
        return next(self._ids)

    def take(self) -> list[t.Command]:
        """All of them; the outbox is empty then."""
        taken = self._commands
        if not taken:
            return []
        self._commands = []
        return taken

    def load(self, entry: SlotEntry) -> None:
        self._commands.append(
            t.Load(entry.worker, entry.slot, entry.expert, entry.load_id, entry.form, entry.host_slot, entry.in_memory)
        )

    def evict(self, entry: SlotEntry) -> None:
        self._commands.append(t.Evict(entry.worker, entry.slot, entry.expert))

    def compute(self, demand: Demand, slot: int, start: int, stop: int, evict: bool) -> int:
        """Returns the id of the call."""
        call_id = next(self._ids)
        self._commands.append(
            t.Compute(demand.worker, slot, demand.expert, call_id, demand.visit.id, start, stop, evict)
        )
        return call_id

    def compute_audit(self, entry: SlotEntry, audit: int, rows: int, evict: bool) -> int:
        """All rows of an audit in one part. Returns the id of the call."""
        call_id, visit = next(self._ids), t.Visit(-audit, 0, entry.expert.layer)
        self._commands.append(t.Compute(entry.worker, entry.slot, entry.expert, call_id, visit, 0, rows, evict))
        return call_id

    def route(self, visit: t.Visit, experts: tuple[tuple[int, ...], ...], resident: Iterable[int]) -> None:
        self._commands.append(t.Route(visit, experts, tuple(resident)))

    def resume(self, visit: t.Visit) -> None:
        self._commands.append(t.Resume(visit))

    def fail(self, request: int, reason: str) -> None:
        self._commands.append(t.Fail(request, reason))

    def follow(self, request: int, step: int) -> None:
        self._commands.append(t.Follow(request, step))

    def align(self, align: t.Align) -> None:
        self._commands.append(align)

    def unfollow(self, request: int) -> None:
        self._commands.append(t.Unfollow(request))

    def drop_audit(self, audit: int) -> None:
        self._commands.append(t.AuditDropped(audit))

"""Audits in the random worlds: when they are requested, and what the referee demands of them.

An audit is never computed by a worker in `avoid`, nor at a host place, nor where a gate's experts are loaded or
computed, and there is one on a worker at most. It takes no slot that is taken, and its load none that is wanted. It
begins at once where that is possible; where everything stays, a free slot may be some expert's. Then comes one of two:
its computation's end, or its `AuditDropped`, for a reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from scheduler import types as t
from scheduler.core.machine import Core
from scheduler.core.snapshot import CoreSnapshot
from support.worlds.plan import Plan

if TYPE_CHECKING:
    from support.worlds.books import Books


class AuditRequests:
    """Audits of experts that are in slots, or of any, drawn apart from all else in the world."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._rng, self._numbers = plan, Random(f"audits {plan.seed}"), itertools.count(1)

    def after(self, event: t.Event, books: Books) -> t.AuditRequested | None:
        """None: none is requested after this fact."""
        rng, plan = self._rng, self._plan
        if isinstance(event, t.AuditRequested) or rng.random() >= plan.auditing:
            return None
        if not any(one.open for one in books.requests.values()):
            return None
        expert = t.ExpertId(rng.randrange(plan.layers), rng.randrange(plan.experts))
        held = [attempt.load.expert for attempt in books.slots.values()]
        if held and rng.random() < 0.5:
            expert = rng.choice(held)
        avoid = tuple(worker for worker in sorted(books.live) if rng.random() < 0.3)
        return t.AuditRequested(next(self._numbers), expert, rng.randint(1, 4), avoid)


@dataclass(slots=True, eq=False)
class _Audit:
    """`load`: its own; None where the expert is kept. `over`: its load or computation has failed, or its worker is
    lost."""

    call: t.Compute
    load: t.Load | None
    loaded: bool = False
    over: bool = False

    @property
    def place(self) -> tuple[int, int]:
        return self.call.worker, self.call.slot


class AuditBooks:
    """Those under way, by number, from facts and commands."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._under_way: dict[int, _Audit] = {}

    def own_slots(self) -> dict[tuple[int, int], _Audit]:
        """Slots that hold an expert for an audit alone."""
        return {audit.place: audit for audit in self._under_way.values() if audit.load is not None}

    def computing(self, worker: int) -> int:
        """How many of the worker's slots no request can have yet: the load has ended, and the computation has not."""
        return sum(audit.loaded for audit in self._under_way.values() if audit.place[0] == worker and audit.load)

    # --- facts --------------------------------------------------------------------------------------------------------

    def load_over(self, event: t.LoadEnded | t.LoadFailed) -> bool:
        """Whether it was one of theirs."""
        audit = next((a for a in self._under_way.values() if a.load and a.load.load_id == event.load_id), None)
        if audit is None:
            return False
        if isinstance(event, t.LoadEnded):
            audit.loaded = True
        else:
            audit.over = True
            self._books.seen["audit's load failed"] += 1
        return True

    def call_over(self, event: t.ComputeEnded | t.ComputeFailed) -> bool:
        """Whether it was one of theirs."""
        found = [(number, a) for number, a in self._under_way.items() if a.call.call_id == event.call_id]
        for number, audit in found:
            if isinstance(event, t.ComputeFailed):
                audit.over = True
                self._books.seen["audit's computation failed"] += 1
            else:
                del self._under_way[number]
                self._books.seen["audit done" if audit.load else "audit done where it is kept"] += 1
        return bool(found)

    def lost(self, worker: int) -> None:
        for audit in self._under_way.values():
            audit.over |= audit.call.worker == worker
            self._books.seen["audit's worker lost"] += audit.call.worker == worker

    # --- commands -----------------------------------------------------------------------------------------------------

    def judge_begin(self, event: t.AuditRequested, commands: Sequence[t.Command], core: Core) -> Iterator[int]:
        """The answer to a request: `AuditDropped`, or its load and computation, or the latter alone. Yields new ids."""
        snapshot = core.snapshot()
        kept = list(self._where_kept(event, snapshot))
        free = [number for number in self._books.live if self._is_free(event, number, snapshot)]
        match commands:
            case [t.AuditDropped(number)]:
                assert number == event.audit
                assert not kept, f"{event} is dropped, though the expert is kept in {kept}"
                assert self._books.plan.stay or not free, f"{event} is dropped, though workers {free} are free"
                self._books.seen["audit dropped at once"] += 1
                return
            case [t.Compute() as call]:
                load = None
                assert (call.worker, call.slot) in kept, f"{call}: the expert is kept in {kept}"
            case [t.Load() as load, t.Compute() as call]:
                assert not kept, f"{load}, though the expert is kept in {kept}"
                assert load.worker in free, f"{load}: free are {free}"
                place = load.worker, load.slot
                assert place not in self._books.slots, f"{load} into a taken slot"
                assert place not in self.own_slots(), f"{load} into another audit's slot"
                assert 0 <= load.slot < self._books.live[load.worker]
                assert (place, load.expert, load.form) == ((call.worker, call.slot), event.expert, "")
                yield load.load_id
            case _:
                raise AssertionError(f"{event} is answered with {commands}")
        assert call.expert == event.expert
        assert call.visit == t.Visit(-event.audit, 0, event.expert.layer)
        assert (call.start, call.stop, call.evict) == (0, event.rows, load is not None)
        yield call.call_id
        self._under_way[event.audit] = _Audit(call, load)

    def _rests(self, event: t.AuditRequested, number: int, snapshot: CoreSnapshot) -> bool:
        """It may be asked, and no gate waits for it."""
        if number in event.avoid or any(audit.call.worker == number for audit in self._under_way.values()):
            return False
        used = [attempt for place, attempt in self._books.slots.items() if place[0] == number and attempt.uses]
        assert not used or snapshot.workers[number].backlog
        return not snapshot.workers[number].backlog

    def _where_kept(self, event: t.AuditRequested, snapshot: CoreSnapshot) -> Iterator[tuple[int, int]]:
        for place, attempt in self._books.slots.items():
            usable = attempt.keeps and attempt.loaded and not attempt.failed and not attempt.load.form
            if usable and attempt.load.expert == event.expert and self._rests(event, place[0], snapshot):
                yield place

    def _is_free(self, event: t.AuditRequested, number: int, snapshot: CoreSnapshot) -> bool:
        """Nothing is on its way to a slot of it, nothing waits for one, and one is free."""
        taken = sum(place[0] == number for place in self._books.slots)
        if taken >= self._books.live[number] or self._books.links[number] or snapshot.workers[number].queued:
            return False
        return self._books.holds(number, event.expert) and self._rests(event, number, snapshot)

    def judge_evict(self, c: t.Evict, commands: Sequence[t.Command]) -> bool:
        """Whether it evicts what an audit has loaded: only before its computation has begun, or after it has failed."""
        found = [(n, a) for n, a in self._under_way.items() if a.load and a.place == (c.worker, c.slot)]
        for number, audit in found:
            assert c.expert == audit.call.expert
            assert audit.over or not audit.loaded, f"{c} while audit {number} is computed"
            assert t.AuditDropped(number) in commands[commands.index(c) :], f"{c}, and audit {number} is not dropped"
        return bool(found)

    def judge_drop(self, c: t.AuditDropped, commands: Sequence[t.Command]) -> None:
        """For a reason, and with its slot freed before."""
        audit = self._under_way.pop(c.audit)
        books, before = self._books, commands[: commands.index(c)]
        worker, slot = audit.place
        freed = t.Evict(worker, slot, audit.call.expert) in before
        if audit.load is not None:
            assert freed or worker not in books.live, f"{c}, and {audit.load} is still there"
        if audit.over:
            return
        assert freed, f"{c} for no reason"
        if audit.load is None:
            books.seen["audit dropped with the kept"] += 1
            return
        loads = any(isinstance(o, t.Load) and o.worker == worker for o in commands)
        assert loads or books.plan.policy != "none", f"{c}, and nothing is loaded instead"
        books.seen["audit gave way"] += 1

    def check(self, core: Core) -> None:
        """After each fact's commands."""
        books, snapshot = self._books, core.snapshot()
        assert set(snapshot.audits) == set(self._under_way)
        workers = [audit.call.worker for audit in self._under_way.values()]
        assert len(workers) == len(set(workers)), f"several audits on a worker: {workers}"
        for number, audit in self._under_way.items():
            here = snapshot.workers[audit.call.worker]
            assert not audit.over, f"audit {number} is over, and not dropped"
            assert audit.call.call_id in snapshot.calls
            assert here.slots[audit.call.slot] == audit.call.expert
            if audit.load is None:
                assert books.slots[audit.place].load.expert == audit.call.expert
            elif not audit.loaded:
                assert audit.load.load_id in snapshot.loads
                assert not here.queued, f"{here.queued} wait while audit {number} loads"
                assert not books.links[audit.call.worker], f"audit {number} loads beside {books.links}"

"""Audits: computations that one worker has done and another does again, so that the outputs can be compared.

They belong to no request, and requests come first. An audit begins only on a worker with no computation to do, one at a
time. A load for it gives way to any other load of its worker. So a request waits for at most one audit's computation.
No policy hears of audits.
"""

from __future__ import annotations

from heapq import heappop, heappush

from scheduler.core.commands import Commands
from scheduler.core.state import Audit, SlotEntry, State, Worker
from scheduler.core.stats import RequestStats
from scheduler.core.workers import WorkerTable
from scheduler.policies.precision import FULL, Precision
from scheduler.types import AuditRequested, ExpertId


class AuditTable:
    """Changes what `State.audits` holds, and the slots of audits' own loads."""

    def __init__(self, state: State, commands: Commands, workers: WorkerTable, precision: Precision) -> None:
        self._state = state
        self._commands = commands
        self._workers = workers
        self._loads_full = FULL in precision.forms

    def begin(self, event: AuditRequested) -> None:
        """Where the expert is kept, else where a slot is free and the link rests; else it is dropped."""
        kept = self._state.kept[event.expert.layer].get(event.expert.expert)
        if kept is not None and self._may_share(kept, event):
            self._send(kept, event, alone=False)
            return
        worker = self._free_worker(event)
        if worker is None:
            self._commands.drop_audit(event.audit)
        else:
            self._send(self._load(worker, event), event, alone=True)

    def loading(self, worker: int) -> Audit | None:
        """The audit whose load is in flight on the worker's link."""
        audits = self._state.audits
        return next((a for a in audits.values() if a.loading and a.entry.worker == worker), None) if audits else None

    def give_way(self, worker: Worker) -> None:
        """A demand or a prefetch is about to load there."""
        audit = self.loading(worker.number)
        if audit is not None:
            self._give_up(audit)

    # --- what happens to it -------------------------------------------------------------------------------------

    def on_load_ended(self, load_id: int) -> None:
        audit = self._of_load(load_id)
        if audit is not None:
            audit.entry.loaded = True

    def on_load_failed(self, load_id: int) -> None:
        audit = self._of_load(load_id)
        if audit is not None:
            self._workers.host_memory.on_doubted(audit.entry.worker, audit.entry.expert)
            self._give_up(audit)

    def on_computed(self, call_id: int) -> None:
        """The worker has evicted what it loaded for the audit."""
        audit = self._state.audits.pop(call_id, None)
        if audit is not None and audit.alone:
            self._free(audit.entry)

    def on_compute_failed(self, call_id: int) -> None:
        audit = self._state.audits.get(call_id)
        if audit is not None:
            self._give_up(audit)

    def on_evicted(self, kept: SlotEntry) -> None:
        """The policy's victim, or another reason: no audit is computed there to its end."""
        for audit in [one for one in self._state.audits.values() if one.entry is kept]:
            self._drop(audit)

    def on_worker_lost(self, worker: int) -> None:
        for audit in [one for one in self._state.audits.values() if one.entry.worker == worker]:
            self._drop(audit)

    # --- where --------------------------------------------------------------------------------------------------

    def _rests(self, number: int, event: AuditRequested) -> bool:
        """The worker may be asked, and no gate waits for it."""
        if number in event.avoid or self._state.workers[number].backlog:
            return False
        return all(audit.entry.worker != number for audit in self._state.audits.values())

    def _may_share(self, kept: SlotEntry, event: AuditRequested) -> bool:
        """Another form would give another output."""
        return kept.loaded and kept.form == FULL and self._rests(kept.worker, event)

    def _free_worker(self, event: AuditRequested) -> Worker | None:
        """Of those that could load it at once, one with the most free slots; of equals each in its turn."""
        live = self._workers.live
        turn = event.audit % len(live) if live else 0
        workers = [self._state.workers[number] for number in (*live[turn:], *live[:turn])]
        held_by = self._workers.holders.of(event.expert)
        workers = [one for one in workers if one.number in held_by]
        able = [one for one in workers if self._may_load(one, event.expert) and self._rests(one.number, event)]
        return max(able, key=lambda one: len(one.free), default=None)

    def _may_load(self, worker: Worker, expert: ExpertId) -> bool:
        homes = self._workers.homes
        if homes is not None and not homes.room(worker.number):  # every free slot is some expert's home
            return False
        if self._workers.host_memory.would_lose(worker.number, expert, FULL):
            return False
        forms = worker.joined.forms
        fits = any(cost.fits for cost in forms if cost.form == FULL) if forms else self._loads_full
        return fits and bool(worker.free) and not worker.queue and not worker.link

    # --- slots --------------------------------------------------------------------------------------------------

    def _load(self, worker: Worker, event: AuditRequested) -> SlotEntry:
        slot, nobody = heappop(worker.free), RequestStats(0)
        entry = SlotEntry(worker.number, slot, event.expert, self._commands.next_id(), False, nobody, [])
        entry.host_slot = self._workers.host_memory.find(worker.number, event.expert, FULL)
        entry.in_memory = entry.host_slot is not None
        worker.slots[slot] = entry
        self._commands.load(entry)
        return entry

    def _send(self, entry: SlotEntry, event: AuditRequested, alone: bool) -> None:
        call_id = self._commands.compute_audit(entry, event.audit, event.rows, evict=alone)
        self._state.audits[call_id] = Audit(event.audit, call_id, entry, alone)

    def _give_up(self, audit: Audit) -> None:
        if audit.alone:
            self._commands.evict(audit.entry)
            self._free(audit.entry)
        self._drop(audit)

    def _drop(self, audit: Audit) -> None:
        del self._state.audits[audit.call_id]
        self._commands.drop_audit(audit.number)

    def _free(self, entry: SlotEntry) -> None:
        worker = self._state.workers[entry.worker]
        worker.slots[entry.slot] = None
        heappush(worker.free, entry.slot)
        if worker.queue:
            self._state.touched.add(worker.number)

    def _of_load(self, load_id: int) -> Audit | None:
        audits = self._state.audits.values()
        return next((one for one in audits if one.loading and one.entry.load_id == load_id), None)

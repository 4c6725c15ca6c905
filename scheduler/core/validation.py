"""Checks the books of a core: demands, slots, loads, calls and the tables of them.

`Core.validate` runs it, after each event if asked to (`odmoe simulate --replay FILE --validate`). Each check counts
anew what the core keeps up to date event by event. Not checked: audits, homes, and what the policies remember.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from scheduler.core.host_memory import HostMemory
from scheduler.core.state import Demand, InconsistentStateError, SlotEntry, State, Worker


def validate(state: State) -> None:
    """Raises InconsistentStateError, which names everything that does not agree."""
    demands = {demand for visit in state.visits.values() for demand in visit.demands.values()}
    audited = {id(audit.entry) for audit in state.audits.values() if audit.alone}
    wrong = [*_visits(state), *_waiting(state, demands), *_calls(state, demands), *_loads(state), *_marks(state)]
    wrong += _sharing(state, audited)
    for worker in state.workers.values():
        found = (*_slots(worker, audited), *_places(worker, demands))
        wrong += [f"worker {worker.number}: {what}" for what in found]
    for number, memory in state.host_memories.items():
        wrong += [f"worker {number}: {what}" for what in (*memory.faults(), *_on_the_way(state, number, memory))]
    if wrong:
        raise InconsistentStateError("; ".join(wrong))


def _name(demand: Demand) -> str:
    layer, expert = demand.expert
    return f"expert {expert} of layer {layer} (demand {demand.seq})"


def _entries(worker: Worker, audited: Collection[int] = ()) -> list[SlotEntry]:
    """What is in its slots. `audited`: without these, which audits have loaded for themselves."""
    return [entry for entry in worker.slots if entry is not None and id(entry) not in audited]


# --- visits and demands -------------------------------------------------------------------------------------------


def _visits(state: State) -> Iterator[str]:
    for key, visit in state.visits.items():
        if visit.id != key or state.requests.get(key.request) is not visit.request:
            yield f"the visit {key} is not its request's"
        confirmed = [demand for demand in visit.demands.values() if demand.confirmed]
        if visit.uncomputed != len(confirmed):
            yield f"the visit {key} waits for {visit.uncomputed} experts, and {len(confirmed)} are chosen"
        missing = sum(demand.state in ("queued", "loading") for demand in confirmed)
        if confirmed and visit.missing != missing:
            yield f"the visit {key} misses {visit.missing} experts in slots, not {missing}"
        for place, demand in visit.demands.items():
            if demand.visit is not visit or demand.key != place:
                yield f"{_name(demand)} stands under {place} of the visit {key}"
            yield from _demand(state, demand)


def _demand(state: State, demand: Demand) -> Iterator[str]:
    """It is in the one place where its state says that it is."""
    worker, entry = state.workers.get(demand.worker), demand.entry
    waits = state.waiting.get(demand.seq) is demand or state.unheld.get(demand.seq) is demand
    queued = worker is not None and demand in worker.queue
    hosted = worker is not None and worker.hosted.get(demand.seq) is demand
    in_slot = worker is not None and entry is not None and entry in worker.slots and demand in entry.users
    places = {"queued": waits or queued, "hosted": hosted, "loading": in_slot, "ready": in_slot, "over": False}
    if not places[demand.state] or sum((waits, queued, hosted, in_slot)) != 1:
        yield f"{_name(demand)} is {demand.state}, and not in that place of worker {demand.worker}"
    if in_slot and entry is not None and entry.loaded is not (demand.state == "ready"):
        yield f"{_name(demand)} is {demand.state}, and its load has {'' if entry.loaded else 'not '}ended"
    if demand.calls and not demand.confirmed:
        yield f"{_name(demand)} is computed before its gate"


def _waiting(state: State, demands: set[Demand]) -> Iterator[str]:
    for seq, demand in (*state.waiting.items(), *state.unheld.items()):
        if demand.seq != seq or demand.worker != -1 or demand not in demands:
            yield f"{_name(demand)} waits for a worker, and no visit needs it so"
    if state.tried is not None and state.tried not in demands:
        yield f"{_name(state.tried)} is tried again, and no visit needs it"


# --- workers ------------------------------------------------------------------------------------------------------


def _slots(worker: Worker, audited: set[int]) -> Iterator[str]:
    free = [number for number, entry in enumerate(worker.slots) if entry is None]
    if sorted(worker.free) != free:
        yield f"slots {free} are free, and {sorted(worker.free)} are listed"
    for number, entry in enumerate(worker.slots):
        if entry is not None and (entry.slot, entry.worker) != (number, worker.number):
            yield f"slot {number} has an expert of slot {entry.slot} of worker {entry.worker}"
    entries = _entries(worker, audited)
    loading = [entry for entry in entries if not entry.loaded]
    if {id(entry) for entry in worker.link} != {id(entry) for entry in loading} or len(worker.link) != len(loading):
        yield f"{len(loading)} loads are in flight, and {len(worker.link)} are listed"
    idle = {entry.expert for entry in entries if entry.keeps and not entry.users}
    if idle != worker.idle.keys():
        yield f"the experts {sorted(idle)} are kept for later, and {sorted(worker.idle)} are listed"
    unused = [entry for entry in entries if not (entry.users or entry.keeps)]
    if unused:
        yield f"the experts {sorted(entry.expert for entry in unused)} are in slots for nobody"


def _on_the_way(state: State, worker: int, memory: HostMemory) -> Iterator[str]:
    """What is on its way to host memory belongs to a load in flight."""
    for held in memory.in_memory.values():
        entry = state.loads.get(held.load_id)
        if held.load_id and (entry is None or (entry.worker, entry.expert) != (worker, held.expert)):
            yield f"{held.expert} is on its way to host slot {held.slot}, and no load brings it"


def _places(worker: Worker, demands: set[Demand]) -> Iterator[str]:
    """Whoever is listed here is needed by a visit; `_demand` checks the reverse."""
    listed = list(worker.demands())
    if any(demand not in demands or demand.worker != worker.number for demand in listed):
        yield "demands are listed that no visit needs there"
    if len(set(listed)) != len(listed):
        yield "a demand is listed twice"
    if [demand.rank for demand in worker.queue] != sorted(demand.rank for demand in worker.queue):
        yield "the queue is not in order"
    backlog = sum(demand.confirmed for demand in listed)
    if worker.backlog != backlog:
        yield f"{backlog} chosen experts are to be computed, and {worker.backlog} are counted"


# --- tables of all workers ----------------------------------------------------------------------------------------


def _loads(state: State) -> Iterator[str]:
    listed = {entry.load_id: entry for worker in state.workers.values() for entry in worker.link}
    if listed != state.loads:
        yield f"the loads {sorted(listed)} are in flight, and {sorted(state.loads)} are listed"


def _sharing(state: State, audited: set[int]) -> Iterator[str]:
    """What may be shared: kept experts, others in slots, and queued demands."""
    entries = [entry for worker in state.workers.values() for entry in _entries(worker, audited)]
    kept = {(layer, number): entry for layer, found in state.kept.items() for number, entry in found.items()}
    if kept != {entry.expert: entry for entry in entries if entry.keeps}:
        yield f"the experts {sorted(kept)} are listed as kept, and others are"
    passing = {entry for listed in state.passing.values() for entry in listed}
    if any(entry.keeps for entry in passing) or not passing <= set(entries):
        yield "experts are listed as shared that are in no slot"
    if any(entry not in passing for entry in entries if not (entry.keeps or entry.leaving)):
        yield "experts in slots are not listed as shared"
    queued = {demand for listed in state.queued.values() for demand in listed}
    if queued != {demand for worker in state.workers.values() for demand in worker.queue}:
        yield f"{len(queued)} demands are listed as queued, and others are"


def _calls(state: State, demands: set[Demand]) -> Iterator[str]:
    calls = {call: demand for demand in demands for call in demand.calls}
    if calls != state.calls:
        yield f"the computations {sorted(calls)} are under way, and {sorted(state.calls)} are listed"


def _marks(state: State) -> Iterator[str]:
    """They are of one event, and each event ends without them."""
    if state.touched or state.held_back:
        yield f"workers {sorted(state.touched)} and visits {list(state.held_back)} are left to be looked at"

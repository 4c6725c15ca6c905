"""What must hold once all commands of a fact have been given, and when everything is over. See `referee.py` for
what is not checked."""

from __future__ import annotations

from collections import Counter

from scheduler import types as t
from scheduler.core.machine import MAX_FAILURES, Core
from scheduler.core.slots import PREFETCHES
from scheduler.core.stats import RequestStats
from support.worlds.books import Books
from support.worlds.records import Attempt, Expert, RequestBooks

Count = dict[Expert, int]


def _add(count: Count, expert: Expert) -> None:
    count[expert] = count.get(expert, 0) + 1


def check_settled(books: Books, core: Core) -> None:
    """After each fact's commands: nothing is held for nobody, and nobody waits for no reason."""
    named, predicted = _demands(books)
    in_slots: Count = {}
    passing: Count = {}
    kept: Count = {}
    by_worker: dict[int, list[Attempt]] = {w: [] for w, slots in books.live.items() if slots}
    for (worker, _), attempt in books.slots.items():
        expert: Expert = attempt.load.expert
        by_worker[worker].append(attempt)
        assert not attempt.failed, f"{attempt.load} has failed, and is still there"
        if not attempt.leaving:
            _add(in_slots, expert)
        if attempt.keeps:
            _add(kept, expert)
        elif not attempt.leaving:
            _add(passing, expert)
        if attempt.uses:
            _check_rows(books, attempt)
    for attempt in books.hosting.values():
        _check_rows(books, attempt)
    for expert, count in passing.items():
        wanted = (expert in named) + predicted.get(expert, 0) + books.warming_up(expert)
        assert count <= wanted + len(books.planned(expert[0])), f"{expert} is held though nobody wants it"
    assert max(kept.values(), default=1) == 1, "kept in two slots"
    assert books.kept == kept, f"kept: {kept}; told: {books.kept}"
    _check_links(books)
    begun: Count = {}
    for attempt in books.slots.values():
        for _ in attempt.uses:
            _add(begun, attempt.load.expert)
    lacking = named.keys() - in_slots.keys() - begun.keys()
    assert core.workers == sorted(books.live)
    suspects = any(books.is_unheld(expert) for expert in core.waiting)
    assert (core.shortfall is not None) == books.lacks or suspects
    if books.short:
        _check_waiting(books, named, predicted, core)
        return
    named = _without_suspects(books, named, core)
    named = {expert: count for expert, count in named.items() if not books.is_unheld(expert)}
    lacking &= named.keys()
    roomy = (
        books.plan.stay and not books.plan.replicas and not any(books.audits.computing(worker) for worker in by_worker)
    )
    assert not lacking or not roomy, f"named, not loaded, and there is room: {lacking}"
    _check_waits(books, named, predicted, {*in_slots, *begun}, by_worker)
    _check_begun(books, named, begun, by_worker)


def _demands(books: Books) -> tuple[Count, Count]:
    """How many visits' united gates have named each expert, to be computed in a slot; and how many rows are predicted
    to need it."""
    named: Count = {}
    for visit, gate in books.gates.items():
        for e in gate.rows if gate.united else ():
            if e not in gate.done and (visit, e) not in books.hosting:
                _add(named, (visit.layer, e))
    predicted: Count = {}
    for visit, experts in books.predictions.items():
        for e in experts:
            _add(predicted, (visit.layer, e))
    return named, predicted


def _check_rows(books: Books, attempt: Attempt) -> None:
    for visit, use in attempt.uses.items():
        rows = books.gates[visit].rows[attempt.load.expert.expert]
        assert use.sent == rows, f"{attempt}: only {use.sent} of {rows} rows sent"


def _check_links(books: Books) -> None:
    """No load that a gate waits for is behind one that is only predicted."""
    for link in books.links.values():
        if len(link) < 2:
            continue
        books.seen["two on a link"] += 1
        urgent = [place for place, attempt in enumerate(link) if attempt.uses]
        for attempt in link[: urgent[-1]] if urgent else ():
            assert books.named(attempt.load.expert), f"{attempt.load} is in the way of {link[urgent[-1]].load}"


def _check_waiting(books: Books, named: Count, predicted: Count, core: Core) -> None:
    """Workers are missing. If all are: what is needed waits, and nothing else."""
    waiting: set[Expert] = {*core.waiting, *core.snapshot().unheld}
    if not sum(books.live.values()):
        needed = {*named, *(e for e in predicted if books.failures[e] < MAX_FAILURES)}
        assert needed <= waiting, f"{needed - waiting} are needed, and do not wait"
    others = [e for e in waiting if e not in named and not books.wanted(t.ExpertId(*e))]
    assert not others, f"{others} wait for nobody"


def _without_suspects(books: Books, named: Count, core: Core) -> Count:
    """Of what lost workers may have loaded or computed, one at a time is tried again, and the others wait for that."""
    waiting = Counter[Expert](core.waiting)
    if not waiting:
        return named
    books.seen["suspects wait"] += 1
    assert waiting.keys() <= books.suspects & named.keys(), f"{waiting} wait, and workers are there"
    tried = [expert for expert in books.suspects if named.get(expert, 0) > waiting[expert]]
    assert tried, f"{waiting} wait, and none is tried"
    return {expert: count - waiting[expert] for expert, count in named.items() if count > waiting[expert]}


def _check_waits(
    books: Books, named: Count, predicted: Count, there: set[Expert], by_worker: dict[int, list[Attempt]]
) -> None:
    """No load waits that could begin."""
    hoped = {e for e in predicted if books.failures[e] < MAX_FAILURES} if books.plan.policy == "none" else set[Expert]()
    for expert in {*named, *hoped} - there:
        holders = [worker for worker in by_worker if books.holds(worker, expert)]
        full = [worker for worker in holders if len(by_worker[worker]) == books.room(worker)]
        busy = any(len(books.links[worker]) >= PREFETCHES for worker in holders)
        assert full or busy or not holders, "something is wanted and every holder has a free slot and an idle link"


def _check_begun(books: Books, named: Count, begun: Count, by_worker: dict[int, list[Attempt]]) -> None:
    """No rows wait that could be sent."""
    if books.plan.prefill == "in-turn":  # what is loaded in turn is named, though not sent yet
        return
    for expert in [expert for expert, count in named.items() if count > begun.get(expert, 0)]:
        # others may have nobody make room while something is computed
        crowded = books.plan.stay and bool(books.plan.replicas)  # a holder may have fewer slots than its part
        enough = all if books.plan.policy in ("none", "all", "lru") and not crowded else any
        holders = {worker: held for worker, held in by_worker.items() if books.holds(worker, expert)}
        full = [worker for worker, held in holders.items() if len(held) == books.room(worker)]
        used = {w: [bool(attempt.uses) for attempt in by_worker[w]] + [True] * books.audits.computing(w) for w in full}
        stuffed = [worker for worker in full if enough(used[worker])]
        assert stuffed, "a named expert waits though every worker could make room"


# --- at the end -------------------------------------------------------------------------------------------------------


def check_end(books: Books, core: Core) -> None:
    """Everything is over: nothing may be left, and the core's figures must be the referee's."""
    plan, seen = books.plan, books.seen
    assert all(attempt.keeps for attempt in books.slots.values()), f"still in slots: {books.slots}"
    assert not any(attempt.uses for attempt in books.slots.values())
    assert not books.hosting
    assert not books.gates
    assert not any(one.open for one in books.requests.values())
    assert core.idle()
    left = core.snapshot()
    assert not left.audits
    for number, worker in left.workers.items():
        held = [books.slots.get((number, slot)) for slot in range(books.live[number])]
        assert worker.slots == tuple(attempt and attempt.load.expert for attempt in held)
        assert worker.kept == {attempt.load.expert for attempt in held if attempt is not None}
        assert worker.free == tuple(slot for slot, attempt in enumerate(held) if attempt is None)
    stats = list(core.stats.values())
    assert sum(one.loads for one in stats) == books.loaded
    assert sum(one.bytes_loaded for one in stats) == books.bytes
    hits = sum(one.reused for one in stats)
    assert books.again <= hits <= books.computed  # what was computed from a load that had served already is a hit
    preempted, unused = sum(one.preempted for one in stats), sum(one.unused for one in stats)
    seen["hits"] += hits
    seen["pre-empted"] += preempted
    seen["unused"] += unused
    reloads = sum(one.reloads for one in stats)
    assert reloads in books.reloads, f"{reloads} reloads: {books.reloads}"
    if not plan.forms:
        assert preempted in books.preempted, f"{preempted} pre-empted: {books.preempted}"
        assert unused in books.unused, f"{unused} unused: {books.unused}"
    if books.smooth and not plan.forms:
        assert hits in books.hits, f"{hits} hits: {books.hits}"
        figures = (books.reloads, books.preempted, books.unused, books.hits)
        seen["clear"] += all(figure.exact for figure in figures)
    if plan.requests == 1:
        assert core.stats[1].decode_loads == books.decode_loaded
    for number, one in books.requests.items():
        _check_request(books, one, core.stats[number])
        _check_recall(books, one, core.stats[number])


def _check_request(books: Books, one: RequestBooks, stats: RequestStats) -> None:
    plan = books.plan
    assert stats.late == one.late
    assert stats.loads in one.loads, f"{stats.loads} loads: {one.loads}"
    assert stats.reloads in one.reloads
    assert (stats.host_calls, stats.decode_host_calls) == (one.hosted, one.decode_hosted)
    assert stats.named == one.named
    if plan.deadly:  # a request may fail, and unite others' gates, by the loss that changes what is present
        return
    assert stats.present == one.present
    if not plan.failing:
        assert stats.in_time == one.in_time
    if not plan.forms:
        assert stats.unused in one.unused
        assert not books.smooth or stats.reused in one.hits
    if not one.broken:
        assert stats.stall_s == one.stall
        if plan.prefill != "in-turn" or (books.smooth and plan.policy in ("none", "all")):
            assert stats.prefill_stall_s == one.prefill_stall
    books.seen["stall"] += one.stall > 0


def _check_recall(books: Books, one: RequestBooks, stats: RequestStats) -> None:
    """Equations (2) and (3): what was activated, token by token, and how much of it some prediction had named."""
    rows = [(row, each) for row, readings in one.readings.items() for each in readings]
    pairs = [
        (row, len(each.named & each.predicted), len(each.named)) for row, each in rows if each.predicted is not None
    ]
    stats.close()
    assert stats.unpredicted == sum(len(each.named) for _, each in rows if each.predicted is None)
    books.seen["unpredicted"] += stats.unpredicted > 0
    for n in range(books.plan.answer):
        of_token = [pair for pair in pairs if pair[0].position == one.prompt + n]
        tally = stats.by_index[n] if n < len(stats.by_index) else None
        correct, activated = sum(pair[1] for pair in of_token), sum(pair[2] for pair in of_token)
        assert ((tally.correct, tally.activated) if tally else (0, 0)) == (correct, activated)
    right, total = sum(pair[1] for pair in pairs), sum(pair[2] for pair in pairs)
    assert stats.overall.recall == (right / total if total else None)
    books.seen["recall between 0 and 1"] += 0 < right < total

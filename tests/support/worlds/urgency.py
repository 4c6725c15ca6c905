"""Which prefetches come first, as the referee sees it. Checked where no policy keeps experts."""

from __future__ import annotations

from scheduler import types as t
from scheduler.core.machine import MAX_FAILURES, Core
from scheduler.core.slots import PREFETCHES
from support.worlds.books import Books
from support.worlds.records import Attempt

Need = tuple[int, int, int]
"""When an expert is needed: 0 if its request is in the step, in how many steps, in which layer."""


def needs(books: Books, expert: t.ExpertId) -> list[Need]:
    """Of all rows that are predicted to need it, and of prefill's plan."""
    found = []
    for row in books.predicted(expert):
        ahead = books.requests[row.request].ahead(row.position)
        found.append((row.request not in books.step, ahead, row.layer))
    found += [(number not in books.step, 0, expert.layer) for number in books.planned(expert.layer)]
    return [(int(away), ahead, layer) for away, ahead, layer in found]


def check_put_off(books: Books, evicted: list[t.Evict], commands: list[t.Command]) -> None:
    """What may still be needed is evicted only for another load on its worker."""
    if books.plan.policy != "none":
        return
    for c in evicted:
        loads = [o for o in commands if isinstance(o, t.Load) and o.worker == c.worker]
        urgent = any(attempt.uses for attempt in books.links[c.worker])
        assert loads or urgent, f"{c}, and nothing took its place"


def check_order(books: Books, commands: list[t.Command], core: Core) -> None:
    """On each worker, what is needed first is loaded first, and requests that are not in the step yield."""
    if books.plan.policy != "none":
        return
    begun = [c for c in commands if isinstance(c, t.Load) and not books.named(c.expert)]
    several = len(books.requests) > 1
    if not begun and not several:
        return
    for number, worker in core.snapshot().workers.items():
        queued = [e for e in dict.fromkeys(worker.queued) if not (books.named(e) or books.copies(e))]
        # Where it is needed several times, the others may wait on another worker.
        waiting = {e: max(found) for e in queued if (found := needs(books, e)) and books.failures[e] < MAX_FAILURES}
        for c in begun:
            if c.worker == number and waiting:
                _check_first(books, c, waiting)
        if several:
            _check_yields(books, number, waiting)


def _check_first(books: Books, load: t.Load, waiting: dict[t.ExpertId, Need]) -> None:
    mine = min(needs(books, load.expert), default=(1, 0, 0))
    for expert, need in waiting.items():
        if books.plan.block > 1 and need[1] and mine[1]:  # how many steps away a row is depends on the blocks before
            continue
        if need[0] and mine[0]:  # nobody knows which of those that are not in the step is back first
            continue
        assert not need < mine, f"{load}, needed {mine}, before {expert}, needed {need}"
    books.seen["several prefetches wait"] += 1


def _check_yields(books: Books, number: int, waiting: dict[t.ExpertId, Need]) -> None:
    """No slot of the worker is for a request that is not in the step while one that is waits for a slot."""
    mine = [e for e, need in waiting.items() if need[0] == 0]
    held = [attempt for (worker, _), attempt in books.slots.items() if worker == number]
    if not mine or len(held) < books.room(number):
        return
    link = books.links[number]
    if len(link) >= PREFETCHES and not any(_of_absent(books, attempt) for attempt in link):
        return
    for attempt in held:
        assert not _of_absent(books, attempt), f"{attempt.load} is for a request not in the step, {mine} wait"


def _of_absent(books: Books, attempt: Attempt) -> bool:
    """A prefetch, and no request in the step may need it."""
    expert = attempt.load.expert
    if attempt.uses or attempt.failed or books.named(expert):
        return False
    found = needs(books, expert)
    return bool(found) and min(found)[0] == 1

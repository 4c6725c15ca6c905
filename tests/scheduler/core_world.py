"""A small simulated world around the scheduler's core, and a referee that holds it to what must always be true.

The world has workers with slots, loads and computations of random length, messages under way, a main model with random
routes, a shadow that is sometimes wrong, late, silent or gone, workers that die and come. Its time is whole ticks, so
that sums are exact. The referee sees facts and commands only and keeps its own books.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from random import Random

from scheduler import types as t
from scheduler.alignment import Alignment
from scheduler.core import MAX_FAILURES, Core
from scheduler.placement import RoundRobin
from scheduler.precision import Full
from scheduler.predictors import RandomPredictor, Silent
from scheduler.residency import Cacheless, Everything, Residency
from scheduler.routers import TopK
from scheduler.splits import DeviceOnly
from scheduler.strategy import Strategy

NBYTES = 7


@dataclass(frozen=True)
class Plan:
    """`slots`: one number a worker. `faults`: (when, what, whom). Durations: the most ticks that a thing takes.
    `stay`: everything stays in its slot; `chance`: the core predicts at random; `ahead`: prefill loads before gates."""

    seed: int = 0
    slots: tuple[int, ...] = (1, 1, 1, 1)
    group: int = 2
    layers: int = 3
    experts: int = 4
    top_k: int = 2
    mini_batch: int = 3
    periods: tuple[int, int] = (1, 1)
    requests: int = 1
    prompt: int = 5
    answer: int = 3
    main: int = 5
    load: int = 20
    compute: int = 5
    latency: int = 2
    shadow: bool = True
    predict: int = 3
    accuracy: float = 0.8
    failing: float = 0.0
    faults: tuple[tuple[int, str, int], ...] = ()
    stay: bool = False
    chance: bool = False
    ahead: bool = True

    @property
    def all_experts(self) -> int:
        return self.layers * self.experts


FAULTS = ("die", "join", "cancel", "shadow-lost", "shadow-join")


def random_plan(seed: int) -> Plan:
    rng = Random(seed)
    experts = rng.choice((1, 2, 4, 6, 8))
    kinds = rng.sample(FAULTS, rng.randint(0, 3))
    faults = [
        (rng.randint(0, 400), rng.choice(kinds), rng.randint(0, 11)) for _ in range(rng.randint(0, 6) if kinds else 0)
    ]
    return Plan(
        seed=seed,
        slots=tuple(rng.choice((1, 1, 1, 2, 3)) for _ in range(rng.choice((1, 2, 3, 4, 5, 8, 12)))),
        group=rng.randint(1, 4), layers=rng.randint(1, 6), experts=experts, top_k=rng.randint(1, experts),
        mini_batch=rng.choice((1, 2, 4, 128)), periods=(rng.choice((0, 1, 2)), rng.choice((0, 1, 3))),
        requests=rng.choice((1, 1, 2, 3)), prompt=rng.randint(1, 9), answer=rng.randint(1, 5),
        main=rng.choice((1, 5, 30)), load=rng.choice((1, 10, 40)), compute=rng.choice((1, 5, 20)),
        latency=rng.choice((0, 2, 10)), shadow=rng.random() < 0.85, predict=rng.choice((1, 5, 30, 60)),
        accuracy=rng.choice((0.0, 0.5, 0.9, 1.0)), failing=rng.choice((0.0, 0.0, 0.0, 0.03, 0.3)),
        faults=tuple(sorted(faults)),
    )  # fmt: skip


def shape_of(plan: Plan) -> t.ModelShape:
    return t.ModelShape(tuple(range(plan.layers)), plan.experts, plan.top_k)


def roomy(plan: Plan) -> Plan:
    """The same with slots for everything on the workers that it begins with, still as uneven as they were."""
    more = -(-plan.all_experts // len(plan.slots))
    return replace(plan, slots=tuple(slots - 1 + more for slots in plan.slots))


def choosing_plan(seed: int) -> Plan:
    """A random plan with random choices. Where everything stays there is mostly room for it."""
    rng = Random(-1 - seed)
    plan = replace(random_plan(seed), stay=rng.random() < 0.6, chance=rng.random() < 0.5, ahead=rng.random() < 0.5)
    return roomy(plan) if plan.stay and rng.random() < 0.9 else plan


# --- the referee ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Use:
    """What was sent to be computed for one visit, and not answered."""

    sent: int = 0
    owed: set[int] = field(default_factory=set)


@dataclass(eq=False)
class _Attempt:
    """One load and what is computed in its slot, for whom. `used`: something was sent for it; `done`: and answered."""

    load: t.Load
    loaded: bool = False
    failed: bool = False
    at: int = 0
    used: bool = False
    done: bool = False
    uses: dict[t.Visit, _Use] = field(default_factory=dict)


@dataclass(eq=False)
class _Fired:
    at: int
    rows: dict[int, int]
    predicted: frozenset[int]
    done: set[int] = field(default_factory=set)
    last_load: int = 0


@dataclass(eq=False)
class _Books:
    """The referee's own figures of one request."""

    prompt: int
    open: bool = True
    broken: bool = False
    prefilling: bool = True
    reached: tuple[int, int] = (0, -1)
    late: int = 0
    reloads: int = 0
    stall: int = 0
    prefill_stall: int = 0
    activated: dict[t.Visit, frozenset[int]] = field(default_factory=dict)
    matched: dict[t.Visit, frozenset[int]] = field(default_factory=dict)


class Referee:
    """Judges every command when it is given. `seen`: which of the interesting things have happened."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.live: dict[int, int] = {}
        self.slots: dict[tuple[int, int], _Attempt] = {}
        self.loads: dict[int, _Attempt] = {}
        self.calls: dict[int, tuple[_Attempt, t.Visit]] = {}
        self.used: set[int] = set()
        self.books: dict[int, _Books] = {}
        self.fired: dict[t.Visit, _Fired] = {}
        self.standing: dict[t.Visit, tuple[int, ...]] = {}
        self.failures: Counter[t.ExpertId] = Counter()
        self.shadow = False
        self.loaded = self.decode_loaded = self.bytes = self.computed = self.again = 0
        self.seen: Counter[str] = Counter()

    # --- facts ---

    def fact(self, event: t.Event, now: int) -> None:
        match event:
            case t.WorkerJoined():
                self.live[event.worker] = event.slots
                self.seen["joined late"] += now > 0
            case t.WorkerLost():
                del self.live[event.worker]
                held = [place for place in self.slots if place[0] == event.worker]
                for place in held:
                    attempt = self._give_up(place)
                    self.seen["lost while computing" if attempt.uses and attempt.loaded else "lost while loading"] += 1
                self.seen["lost while idle"] += not held
            case t.ShadowJoined():
                self.shadow = True
            case t.ShadowLost():
                self.shadow = False
                self.seen["shadow lost"] += 1
            case t.RequestOpened():
                self.books[event.request] = _Books(event.prompt_tokens)
            case t.RequestClosed():
                books = self.books[event.request]
                if books.open and any(v.request == event.request for v in self.fired):
                    self.seen["closed in a layer"] += 1
                self._close(event.request)
            case t.PassStarted():
                books = self.books[event.request]
                books.prefilling, books.reached = event.prefill, (event.position, -1)
                if self.plan.chance and not event.prefill:
                    self._chances(event)
            case t.TokenDecoded():
                self.books[event.request].prefilling = False
            case t.Predicted():
                self._predicted(event)
            case t.GateFired():
                self._fired(event, now)
            case t.LoadEnded() | t.LoadFailed():
                self._load_over(event, now)
            case t.ComputeEnded() | t.ComputeFailed():
                self._call_over(event)

    def _chances(self, event: t.PassStarted) -> None:
        for layer in range(self.plan.layers):
            visit = t.Visit(event.request, event.position, layer)
            forecasts = RandomPredictor(shape_of(self.plan), self.plan.seed).begun(visit._replace(layer=0), 1, False)
            experts = list(forecasts)[visit.layer].experts
            self._predicted(t.Predicted(*visit, experts))

    def _predicted(self, event: t.Predicted) -> None:
        books = self.books[event.request]
        if not books.open:
            return
        visit = t.Visit(event.request, event.position, event.layer)
        if visit in books.activated:
            books.matched.setdefault(visit, frozenset(event.experts))
        if (event.position, event.layer) <= books.reached:
            books.late += 1
            self.seen["late prediction"] += 1
            return
        self.seen["second prediction"] += visit in self.standing
        self.standing[visit] = event.experts

    def _fired(self, event: t.GateFired, now: int) -> None:
        visit, books = event.visit, self.books[event.visit.request]
        if not books.open:
            return
        predicted = self.standing.pop(visit, None)
        books.reached = (visit.position, visit.layer)
        self.fired[visit] = _Fired(now, dict(event.rows), frozenset(predicted or ()), last_load=now)
        if not books.prefilling and (self.shadow or self.plan.chance):
            books.activated[visit] = frozenset(dict(event.rows))
            if predicted is not None:
                books.matched[visit] = frozenset(predicted)

    def _load_over(self, event: t.LoadEnded | t.LoadFailed, now: int) -> None:
        attempt = self.loads.pop(event.load_id, None)
        if attempt is None:
            self.seen["stale fact"] += 1
        elif isinstance(event, t.LoadFailed):
            attempt.failed = True
            self.failures[attempt.load.expert] += 1
            self.seen["load failed"] += 1
        else:
            attempt.loaded, attempt.at = True, now
            self.bytes += event.nbytes
            for visit in attempt.uses:
                if visit in self.fired:
                    self.fired[visit].last_load = now

    def _call_over(self, event: t.ComputeEnded | t.ComputeFailed) -> None:
        if event.call_id not in self.calls:
            self.seen["stale fact"] += 1
            return
        attempt, visit = self.calls.pop(event.call_id)
        expert = attempt.load.expert
        if isinstance(event, t.ComputeFailed):
            attempt.failed = True
            self.failures[expert] += 1
            self.seen["compute failed"] += 1
            return
        use = attempt.uses[visit]
        use.owed.discard(event.call_id)
        if use.owed:
            return
        del attempt.uses[visit]
        self.fired[visit].done.add(expert.expert)
        self.computed += 1
        self.again += attempt.done
        self.seen["computed where it was"] += attempt.done
        attempt.done = True
        if not self.plan.stay:
            del self.slots[attempt.load.worker, attempt.load.slot]

    def _close(self, request: int) -> None:
        self.books[request].open = False
        for visit in [v for v in self.fired if v.request == request]:
            self.books[request].broken = True
            del self.fired[visit]
            for attempt in self.slots.values() if self.plan.stay else ():
                for call in attempt.uses.pop(visit, _Use()).owed:
                    self.calls.pop(call, None)
        self.standing = {v: e for v, e in self.standing.items() if v.request != request}

    def _give_up(self, place: tuple[int, int]) -> _Attempt:
        attempt = self.slots.pop(place)
        self.loads.pop(attempt.load.load_id, None)
        for use in attempt.uses.values():
            for call in use.owed:
                self.calls.pop(call, None)
        return attempt

    # --- commands ---

    def answered(self, commands: list[t.Command], core: Core) -> None:
        """These were given in answer to the last fact."""
        fresh: set[int] = set()
        failing = {c.request for c in commands if isinstance(c, t.Fail)}
        for c in commands:
            self._command(c, fresh, failing)
        self._settled(core)

    def _command(self, c: t.Command, fresh: set[int], failing: set[int]) -> None:
        """`fresh`: loads commanded in answer to the same fact. `failing`: requests that a Fail will follow for."""
        match c:
            case t.Load():
                assert 0 <= c.slot < self.live[c.worker], f"{c}: no such worker or slot"
                assert (c.worker, c.slot) not in self.slots, f"{c} into a taken slot"
                self._unused(c.load_id)
                fresh.add(c.load_id)
                self._load_allowed(c)
                self.slots[c.worker, c.slot] = self.loads[c.load_id] = _Attempt(c)
                self.loaded += 1
                self.decode_loaded += self.plan.requests == 1 and not self.books[1].prefilling
            case t.Evict():
                assert c.worker in self.live, f"{c} to a worker that is gone"
                attempt = self._give_up((c.worker, c.slot))
                assert attempt.load.expert == c.expert
                assert attempt.failed or not self.plan.stay, f"{c}, though everything stays"
                for visit in attempt.uses:
                    over = visit.request in failing or not self.books[visit.request].open
                    assert attempt.failed or over, f"{c}: the gate named it"
            case t.Compute():
                self._compute(c, fresh)
            case t.Resume():
                fired, books = self.fired.pop(c.visit), self.books[c.visit.request]
                assert fired.done == set(fired.rows), f"{c} before {set(fired.rows) - fired.done} were computed"
                if books.prefilling:
                    books.prefill_stall += fired.last_load - fired.at
                else:
                    books.stall += fired.last_load - fired.at
            case t.Fail():
                assert self.books[c.request].open
                often = max(self.failures.values(), default=0) >= MAX_FAILURES
                lacks = self.plan.stay and sum(self.live.values()) < self.plan.all_experts
                assert not self.live or often or lacks, f"{c} for no reason"
                why = "no worker" if not self.live else "too few slots" if lacks else "too often"
                self.seen[f"failed: {why}"] += 1
                self._close(c.request)
            case t.Follow() | t.Align():
                assert self.shadow
                assert self.books[c.request].open

    def _load_allowed(self, c: t.Load) -> None:
        if self.plan.stay:
            there = [a for a in self.slots.values() if a.load.expert == c.expert]
            assert not there, f"{c}: it is in {there[0].load} already"
        if self.plan.requests == 1 and self.books[1].prefilling and not self.plan.ahead:
            assert any(v.layer == c.expert.layer and c.expert.expert in f.rows for v, f in self.fired.items()), (
                f"{c} before its gate"
            )
            self.seen["loaded in turn"] += 1

    def _unused(self, number: int) -> None:
        assert number not in self.used, f"id {number} was used before"
        self.used.add(number)

    def _compute(self, c: t.Compute, fresh: set[int]) -> None:
        assert c.worker in self.live, f"{c} to a worker that is gone"
        attempt, fired, books = self.slots[c.worker, c.slot], self.fired[c.visit], self.books[c.visit.request]
        layer, expert = c.expert
        assert attempt.load.expert == c.expert, f"{c}: the slot holds {attempt.load.expert}"
        assert layer == c.visit.layer
        assert self.plan.stay or attempt.uses.keys() <= {c.visit}
        assert expert not in fired.done, f"{c}: computed twice"
        others = [
            a for a in self.slots.values() if a is not attempt and c.visit in a.uses and a.load.expert == c.expert
        ]
        assert not others, f"{c}: also under way in {others}"
        first, fresh_one = c.visit not in attempt.uses, not attempt.used and attempt.load.load_id in fresh
        use = attempt.uses.setdefault(c.visit, _Use())
        attempt.used = True
        self.seen["shared"] += first and len(attempt.uses) > 1
        if books.prefilling and not self.plan.ahead:
            self._in_turn(c, attempt, fired)
        assert c.start == use.sent < c.stop <= fired.rows[expert]
        assert c.stop - c.start <= self.plan.mini_batch
        leaves = c.stop == fired.rows[expert] and not self.plan.stay
        assert c.evict == leaves, f"{c}: only the last rows evict, and only where nobody stays"
        self._unused(c.call_id)
        if fresh_one and not books.prefilling:
            missed = expert not in fired.predicted
            books.reloads += missed
            self.seen["reload" if missed else "predicted, loaded late"] += 1
        self.seen["several chunks"] += c.start > 0
        use.sent = c.stop
        use.owed.add(c.call_id)
        self.calls[c.call_id] = attempt, c.visit

    def _in_turn(self, c: t.Compute, attempt: _Attempt, fired: _Fired) -> None:
        assert attempt.loaded, f"{c} before its load has ended"
        fired.last_load = max(fired.last_load, attempt.at)
        if self.plan.requests == 1:
            under_way = [a.load for a in self.slots.values() if a.load.expert.layer == c.visit.layer and not a.loaded]
            assert not under_way, f"{c} before {under_way} have ended"

    # --- after each fact's commands, and at the end ---

    def _settled(self, core: Core) -> None:
        """What must hold whenever all commands of a fact have been given."""
        named = Counter(t.ExpertId(v.layer, e) for v, f in self.fired.items() for e in f.rows if e not in f.done)
        predicted = Counter(t.ExpertId(v.layer, e) for v, experts in self.standing.items() for e in set(experts))
        wanted = named + predicted
        for number, books in self.books.items():
            if books.open and books.prefilling and self.plan.ahead:
                wanted.update(
                    t.ExpertId(layer, e)
                    for layer in range(self.plan.layers) for e in range(self.plan.experts)
                    if layer > books.reached[1] and t.Visit(number, 0, layer) not in self.standing
                )  # fmt: skip
        resident = Counter(attempt.load.expert for attempt in self.slots.values())
        for attempt in self.slots.values():
            for visit, use in attempt.uses.items():
                rows = self.fired[visit].rows[attempt.load.expert.expert]
                assert use.sent == rows, f"{attempt}: only {use.sent} of {rows} rows sent"
        hopeless = Counter({e: n for e, n in predicted.items() if self.failures[e] >= MAX_FAILURES})
        if self.plan.stay:
            missing = (named + predicted - hopeless).keys() - resident.keys()
            assert not missing, f"wanted, not loaded, and there is room: {missing}"
        else:
            assert resident <= wanted, f"held though nobody wants it: {resident - wanted}"
            self._nobody_waits(named, predicted - hopeless, resident)
        assert core.workers == sorted(self.live)

    def _nobody_waits(
        self, named: Counter[t.ExpertId], predicted: Counter[t.ExpertId], resident: Counter[t.ExpertId]
    ) -> None:
        held = {w: [a for (number, _), a in self.slots.items() if number == w] for w in self.live}
        full = [w for w in self.live if len(held[w]) == self.live[w]]
        if named + predicted - resident:
            assert full, "something is wanted and every worker has a free slot"
        if not self.plan.ahead:  # what is loaded in turn is named, though not sent yet
            return
        begun = Counter(a.load.expert for a in self.slots.values() if a.uses)
        if named - begun:
            stuffed = [w for w in full if all(a.uses for a in held[w])]
            assert stuffed, "a named expert waits though every worker could make room"

    def finish(self, core: Core) -> None:
        """Everything is over: nothing may be left, and the core's ledgers must say what the referee's books say."""
        assert self.plan.stay or not self.slots, f"still resident: {self.slots}"
        assert not any(attempt.uses for attempt in self.slots.values())
        assert not self.fired
        assert not any(books.open for books in self.books.values())
        for kept in (core._visits, core._loads, core._calls, core._requests):
            assert not kept
        assert not any(need for worker in core._workers.values() for need in worker.needs())
        ledgers = list(core.ledgers.values())
        assert sum(ledger.loads for ledger in ledgers) == self.loaded
        assert sum(ledger.bytes_loaded for ledger in ledgers) == self.bytes
        hits = sum(ledger.hits for ledger in ledgers)
        assert self.again <= hits <= self.computed  # what was computed from a load that had served already is a hit
        assert self.plan.stay or hits == 0
        self.seen["displaced"] += sum(ledger.displaced for ledger in ledgers)
        self.seen["unused"] += sum(ledger.unused for ledger in ledgers)
        if self.plan.requests == 1:
            assert core.ledgers[1].decode_loads == self.decode_loaded
        for number, books in self.books.items():
            self._audit(core, number, books)

    def _audit(self, core: Core, number: int, books: _Books) -> None:
        ledger = core.ledgers[number]
        assert (ledger.late, ledger.reloads) == (books.late, books.reloads)
        if not books.broken:
            assert (ledger.stall_s, ledger.prefill_stall_s) == (books.stall, books.prefill_stall)
        self.seen["stall"] += books.stall > 0
        # Equations (2) and (3): what was activated, token by token, and how much of it some prediction had named.
        pairs = {
            v: (len(experts & books.matched[v]), len(experts))
            for v, experts in books.activated.items()
            if v in books.matched
        }
        ledger.close()
        assert ledger.unpredicted == sum(len(e) for v, e in books.activated.items() if v not in books.matched)
        self.seen["unpredicted"] += ledger.unpredicted > 0
        for n in range(self.plan.answer):
            of_token = [pair for visit, pair in pairs.items() if visit.position == books.prompt + n]
            tally = ledger.by_index[n] if n < len(ledger.by_index) else None
            correct, activated = sum(c for c, _ in of_token), sum(a for _, a in of_token)
            assert ((tally.correct, tally.activated) if tally else (0, 0)) == (correct, activated)
        total = sum(a for _, a in pairs.values())
        assert ledger.overall.recall == (sum(c for c, _ in pairs.values()) / total if total else None)
        self.seen["recall between 0 and 1"] += bool(total) and 0 < sum(c for c, _ in pairs.values()) < total


class LastUsed(Cacheless):
    """A policy that evicts: least recently used goes. As small as such a policy should be."""

    def __init__(self) -> None:
        self.order: dict[t.ExpertId, None] = {}
        self.told: list[tuple[str, tuple[int, ...], bool]] = []

    def keeps(self, worker: int, expert: t.ExpertId, predicted: bool) -> bool:
        return True

    def used(self, worker: int, expert: t.ExpertId, hit: bool, score: float | None) -> None:
        self.told.append(("used", tuple(expert), hit))
        self.order.pop(expert, None)
        self.order[expert] = None

    def left(self, worker: int, expert: t.ExpertId) -> None:
        self.told.append(("left", tuple(expert), False))
        self.order.pop(expert, None)

    def victim(self, worker: int, wanted: t.ExpertId, evictable: Collection[t.ExpertId]) -> t.ExpertId | None:
        return min(evictable, key=lambda expert: list(self.order).index(expert) if expert in self.order else -1)


class EvenStay(LastUsed):
    """Only some may stay, and they never make room."""

    def keeps(self, worker: int, expert: t.ExpertId, predicted: bool) -> bool:
        return expert.expert % 2 == 0

    def victim(self, worker: int, wanted: t.ExpertId, evictable: Collection[t.ExpertId]) -> t.ExpertId | None:
        return None if worker % 2 else super().victim(worker, wanted, evictable)


class Bystander(Referee):
    """For policies that evict: that nothing hangs is the world's to see, here only that the core's books are sound."""

    def fact(self, event: t.Event, now: int) -> None:
        match event:
            case t.WorkerJoined():
                self.live[event.worker] = event.slots
            case t.WorkerLost():
                del self.live[event.worker]
            case t.ShadowJoined() | t.ShadowLost():
                self.shadow = isinstance(event, t.ShadowJoined)

    def answered(self, commands: list[t.Command], core: Core) -> None:
        kept = [held.expert for w in core._workers.values() for held in w.slots if held is not None and held.keeps]
        assert len(kept) == len(set(kept)), "in two slots"
        for worker in core._workers.values():
            assert [slot for slot, held in enumerate(worker.slots) if held is None] == sorted(worker.free)
            assert worker.named == sum(need.confirmed for need in worker.needs())
            for held in worker.slots:
                assert held is None or bool(held.users) != (worker.idle.get(held.expert) is held)

    def finish(self, core: Core) -> None:
        assert not core._visits
        assert not core._calls
        self.seen["hits"] += sum(ledger.hits for ledger in core.ledgers.values())


# --- the world --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Ticket:
    load: t.Load
    loaded: bool = False
    given_up: bool = False
    waiting: list[t.Compute] = field(default_factory=list)


class _Worker:
    """As worker_node's: loads side by side, one computation at a time, what it says arrives in order and later."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.dead = False
        self.ghost = world.rng.random() < 0.5  # what a dead one said last still arrives
        self.tickets: dict[int, _Ticket] = {}
        self.left: set[int] = set()  # slots that a last computation has freed since their last load
        self.work: deque[tuple[_Ticket, t.Compute]] = deque()
        self.busy = False
        self.said = 0

    def tell(self, event: t.Event) -> None:
        world = self.world
        self.said = max(self.said, world.now + world.ticks(world.plan.latency))
        world.at(self.said - world.now, lambda: None if self.dead and not self.ghost else world.post(event))

    def obey(self, c: t.Load | t.Evict | t.Compute) -> None:
        if self.dead:
            return
        if isinstance(c, t.Load):
            assert c.slot not in self.tickets, f"{c}: the worker has {self.tickets[c.slot].load} there"
            ticket = self.tickets[c.slot] = _Ticket(c)
            self.left.discard(c.slot)
            self.world.at(self.world.ticks(self.world.plan.load), lambda: self.loaded(ticket))
        elif isinstance(c, t.Evict):
            assert c.slot in self.tickets or c.slot in self.left, f"{c}: nothing is there"
            if c.slot in self.tickets:
                self.tickets.pop(c.slot).given_up = True
        elif c.slot in self.tickets:
            ticket = self.tickets[c.slot]
            assert ticket.load.expert == c.expert
            if ticket.loaded:
                self.work.append((ticket, c))
                self.compute()
            else:
                ticket.waiting.append(c)

    def loaded(self, ticket: _Ticket) -> None:
        if ticket.given_up or self.dead:
            return
        if self.world.fails():
            self.tell(t.LoadFailed(ticket.load.load_id, "cannot read"))
            return
        ticket.loaded = True
        self.tell(t.LoadEnded(ticket.load.load_id, NBYTES))
        self.work.extend((ticket, c) for c in ticket.waiting)
        self.compute()

    def compute(self) -> None:
        while self.work and self.work[0][0].given_up:
            self.work.popleft()
        if self.work and not self.busy:
            self.busy = True
            ticket, c = self.work.popleft()
            self.world.at(self.world.ticks(self.world.plan.compute), lambda: self.computed(ticket, c))

    def computed(self, ticket: _Ticket, c: t.Compute) -> None:
        self.busy = False
        if self.world.fails():
            self.tell(t.ComputeFailed(c.call_id, "cannot compute"))
        else:
            self.tell(t.ComputeEnded(c.call_id))  # also when it was given up meanwhile
            if c.evict and not ticket.given_up:
                ticket.given_up = True
                del self.tickets[c.slot]
                self.left.add(c.slot)
        self.compute()


@dataclass(eq=False)
class _Main:
    """One request's token loop."""

    number: int
    over: bool = False
    index: int = -1
    layer: int = 0


class World:
    """`run()` lives through the plan. `log`: every fact, its time and the commands that it was answered with."""

    def __init__(self, plan: Plan, policy: Callable[[], Residency] | None = None) -> None:
        self.plan, self.rng, self.now = plan, Random(plan.seed), 0
        self.policy = policy or (Everything if plan.stay else Cacheless)
        self.core = self.new_core()
        self.referee = Bystander(plan) if policy else Referee(plan)
        self.log: list[tuple[t.Event, int, list[t.Command]]] = []
        self.workers: dict[int, _Worker] = {}
        self.mains: dict[int, _Main] = {}
        self._heap: list[tuple[int, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._inbox: deque[t.Event] = deque()
        self._posting = False

    def new_core(self) -> Core:
        plan = self.plan
        shape = shape_of(plan)
        predictor = RandomPredictor(shape, plan.seed) if plan.chance else Silent(shape)
        strategy = Strategy(predictor, self.policy(), TopK(), DeviceOnly(), Full(), plan.chance)
        prefill = "ahead" if plan.ahead else "in-turn"
        return Core(
            shape, RoundRobin(plan.group), Alignment(*plan.periods), plan.mini_batch, strategy, prefill
        )  # fmt: skip

    def at(self, delay: int, act: Callable[[], object]) -> None:
        heapq.heappush(self._heap, (self.now + delay, next(self._order), act))

    def ticks(self, most: int) -> int:
        return self.rng.randint(0, most)

    def fails(self) -> bool:
        return self.rng.random() < self.plan.failing

    def run(self) -> World:
        for number in range(len(self.plan.slots)):
            self.join(number)
        if self.plan.shadow:
            self.post(t.ShadowJoined())
        for number in range(1, self.plan.requests + 1):
            self.at(self.ticks(20), lambda number=number: self.open(number))
        for when, what, whom in self.plan.faults:
            self.at(when, lambda what=what, whom=whom: self.fault(what, whom))
        while self._heap:
            self.now, _, act = heapq.heappop(self._heap)
            act()
        waiting = [main for main in self.mains.values() if not main.over]
        assert not waiting, f"nothing more happens and these wait: {waiting}"
        self.referee.finish(self.core)
        return self

    def replay(self) -> None:
        """The same facts at the same times: the same commands."""
        core = self.new_core()
        for event, now, commands in self.log:
            assert core.handle(event, now) == commands

    # --- facts in, commands out ---

    def post(self, event: t.Event) -> None:
        self._inbox.append(event)
        if self._posting:
            return
        self._posting = True
        while self._inbox:
            event = self._inbox.popleft()
            self.referee.fact(event, self.now)
            commands = self.core.handle(event, self.now)
            self.log.append((event, self.now, commands))
            self.referee.answered(commands, self.core)
            for c in commands:
                self.act(c)
        self._posting = False

    def act(self, c: t.Command) -> None:
        match c:
            case t.Load() | t.Evict() | t.Compute():
                self.workers[c.worker].obey(c)
            case t.Resume():
                self.at(self.ticks(self.plan.main), lambda: self.next_layer(self.mains[c.visit.request]))
            case t.Fail():
                self.close(self.mains[c.request])
            case t.Align():
                self.shadow_pass(c.request, c.step)

    # --- the main model ---

    def open(self, number: int) -> None:
        main = self.mains[number] = _Main(number)
        self.post(t.RequestOpened(number, self.plan.prompt))
        if not main.over:
            self.post(t.PassStarted(number, 0, self.plan.prompt, prefill=True))
            self.at(self.ticks(self.plan.main), lambda: self.gate(main))

    def close(self, main: _Main) -> None:
        if not main.over:
            main.over = True
            self.post(t.RequestClosed(main.number))

    def gate(self, main: _Main) -> None:
        if main.over:
            return
        plan = self.plan
        if main.index < 0:
            routes = [self.route(main.number, position, main.layer) for position in range(plan.prompt)]
            visit = t.Visit(main.number, 0, main.layer)
        else:
            routes = [self.route(main.number, plan.prompt + main.index, main.layer)]
            visit = t.Visit(main.number, plan.prompt + main.index, main.layer)
        rows = Counter(expert for route in routes for expert in route)
        self.post(t.GateFired(visit, tuple(sorted(rows.items()))))

    def route(self, request: int, position: int, layer: int) -> list[int]:
        rng = Random(f"{self.plan.seed}/{request}/{position}/{layer}")
        return rng.sample(range(self.plan.experts), self.plan.top_k)

    def next_layer(self, main: _Main) -> None:
        if main.over:
            return
        main.layer += 1
        if main.layer == self.plan.layers:
            main.layer, main.index = 0, main.index + 1
            if main.index == self.plan.answer:
                self.close(main)
                return
            self.post(t.TokenDecoded(main.number, main.index))
            if not main.over:
                self.post(t.PassStarted(main.number, self.plan.prompt + main.index, 1, prefill=False))
        self.at(self.ticks(self.plan.main), lambda: self.gate(main))

    # --- the shadow ---

    def shadow_pass(self, request: int, step: int) -> None:
        """Predictions of this pass, now and then also of the next, as fast or as slowly as the plan says."""
        when = 0
        for ahead in range(1 + (self.rng.random() < 0.3)):
            for layer in range(self.plan.layers):
                when += self.ticks(self.plan.predict)
                for again in range(1 + (self.rng.random() < 0.1)):
                    if self.rng.random() < 0.95:
                        event = self.prediction(request, self.plan.prompt + step + ahead, layer)
                        self.at(when + again, lambda event=event: self.say(event))

    def prediction(self, request: int, position: int, layer: int) -> t.Predicted:
        experts: list[int] = []
        for expert in self.route(request, position, layer):
            guess = expert if self.rng.random() < self.plan.accuracy else self.rng.randrange(self.plan.experts)
            if guess not in experts:
                experts.append(guess)
        return t.Predicted(request, position, layer, tuple(experts))

    def say(self, event: t.Predicted) -> None:
        if self.referee.shadow or self.rng.random() < 0.5:
            self.post(event)

    # --- what goes wrong ---

    def join(self, number: int) -> None:
        if number not in self.workers:
            self.workers[number] = _Worker(self, number)
            self.post(t.WorkerJoined(number, self.plan.slots[number % len(self.plan.slots)]))

    def fault(self, what: str, whom: int) -> None:
        if what == "die" and self.workers:
            worker = sorted(self.workers.items())[whom % len(self.workers)][1]
            worker.dead = True
            self.at(self.ticks(10), lambda: self.lose(worker))
        elif what == "join":
            self.join(whom)
        elif what == "cancel" and self.mains:
            self.close(sorted(self.mains.items())[whom % len(self.mains)][1])
        elif what == "shadow-lost" and self.referee.shadow:
            self.post(t.ShadowLost())
        elif what == "shadow-join" and not self.referee.shadow:
            self.post(t.ShadowJoined())

    def lose(self, worker: _Worker) -> None:
        if self.workers.get(worker.number) is worker:
            del self.workers[worker.number]
            self.post(t.WorkerLost(worker.number, "it died"))


def live(plan: Plan, policy: Callable[[], Residency] | None = None) -> World:
    """Lives through a plan, referee and all, and replays it. `policy`: one that evicts."""
    world = World(plan, policy).run()
    world.replay()
    return world

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
from typing import Any

from scheduler import types as t
from scheduler.alignment import Alignment
from scheduler.core.groups import RoundRobin
from scheduler.core.machine import MAX_FAILURES, Core
from scheduler.core.slots import AHEAD
from scheduler.policies import registry
from scheduler.policies.choices import Choices
from scheduler.policies.placement import DeviceOnly
from scheduler.policies.precision import FULL, INT4, Full, Importance
from scheduler.policies.predictors.base import Forecast, RandomPredictor, Silent
from scheduler.policies.residency.base import Cacheless, Everything, Residency
from scheduler.policies.routers import TopK
from scheduler.policies.strategy import Strategy

NBYTES = 7

Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Plan:
    """`slots`: one number a worker. `faults`: (when, what, whom). Durations: the most ticks that a thing takes.
    A worker without slots is a host place. `policy`: one of `POLICIES`, or the catalogue's. `predictor`: none, chance,
    or one that is told what the main model foresees: gate, attention or token. `router`, `split`, `forms`: one that
    decides otherwise than the gate, the device alone, and full precision."""

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
    policy: str = "none"
    predictor: str = "none"
    prefill: str = "ahead"
    router: bool = False
    split: bool = False
    forms: bool = False

    @property
    def all_experts(self) -> int:
        return self.layers * self.experts

    @property
    def stay(self) -> bool:
        return self.policy == "all"


PREDICTORS = ("none", "chance", "gate", "attention", "token")
PREFILLS = ("ahead", "pipelined", "in-turn")
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
    more = -(-plan.all_experts // sum(slots > 0 for slots in plan.slots))
    return replace(plan, slots=tuple(slots and slots - 1 + more for slots in plan.slots))


def choosing_plan(seed: int) -> Plan:
    """A random plan with random choices. Where everything stays there is mostly room for it."""
    rng = Random(-1 - seed)
    plan = random_plan(seed)
    plan = replace(
        plan, policy=rng.choice(tuple(POLICIES)), predictor=rng.choice(PREDICTORS), prefill=rng.choice(PREFILLS),
        router=rng.random() < 0.3, split=rng.random() < 0.7, forms=rng.random() < 0.15,
        slots=(*plan.slots, 0) if rng.random() < 0.4 else plan.slots,
    )  # fmt: skip
    return roomy(plan) if plan.stay and rng.random() < 0.9 else plan


# --- the referee ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Use:
    """What was sent to be computed for one visit, and not answered."""

    sent: int = 0
    owed: set[int] = field(default_factory=set)


@dataclass(eq=False)
class _Attempt:
    """One load and what is computed in its slot, for whom; or what a host place computes. `keeps`: the policy let it
    stay. `used`: something was sent for it; `done`: and answered. `owner`: the visit that its load was begun for, where
    that can be told."""

    load: t.Load
    keeps: bool = False
    loaded: bool = False
    failed: bool = False
    at: int = 0
    used: bool = False
    done: bool = False
    owner: t.Visit | None = None
    uses: dict[t.Visit, _Use] = field(default_factory=dict)


@dataclass(eq=False)
class _Fired:
    """`chosen`: the gate's own choice, for each row. `predicted`: by the last prediction before the gate."""

    at: int
    rows: dict[int, int]
    chosen: Rows
    predicted: frozenset[int]
    hosted: set[int] = field(default_factory=set)
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
    hits: int = 0
    unused: int = 0
    named: int = 0
    present: int = 0
    hosted: int = 0
    decode_hosted: int = 0
    stall: int = 0
    prefill_stall: int = 0
    activated: dict[t.Visit, frozenset[int]] = field(default_factory=dict)
    matched: dict[t.Visit, frozenset[int]] = field(default_factory=dict)


class Referee:
    """Judges every command when it is given. `seen`: which of the interesting things have happened.

    What the strategy's objects are asked and what they answer reaches it as `heard_...`, as it happens.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.live: dict[int, int] = {}
        self.slots: dict[tuple[int, int], _Attempt] = {}
        self.links: dict[int, list[_Attempt]] = {}
        self.hosting: dict[tuple[int, t.Visit, int], _Attempt] = {}
        self.loads: dict[int, _Attempt] = {}
        self.calls: dict[int, tuple[_Attempt, t.Visit]] = {}
        self.used: set[int] = set()
        self.books: dict[int, _Books] = {}
        self.fired: dict[t.Visit, _Fired] = {}
        self.standing: dict[t.Visit, tuple[int, ...]] = {}
        self.errands: dict[int, list[t.ExpertId]] = {}
        self.failures: Counter[t.ExpertId] = Counter()
        self.shadow = False
        self.loaded = self.decode_loaded = self.bytes = self.computed = self.again = self.preempted = 0
        self.seen: Counter[str] = Counter()
        self.owners = True  # whose load it is can be told by commands alone
        self.clear = not plan.forms  # and why it goes
        self.smooth = True  # nothing was lost, nothing has failed
        self.kept: Counter[t.ExpertId] = Counter()
        self._keeps: deque[tuple[int, t.ExpertId, bool]] = deque()
        self.named_by: dict[t.Visit, frozenset[int]] = {}
        self._resumed: dict[t.Visit, _Fired] = {}
        self._request = -1
        self._victims: list[tuple[int, t.ExpertId]] = []
        self._routed: Rows | None = None
        self._gate: t.Visit | None = None
        self._now = 0
        self._before: dict[t.ExpertId, _Attempt] = {}

    # --- what the strategy's objects say ---

    def heard_forecasts(self, forecasts: list[Forecast]) -> None:
        for visit, experts, bring in forecasts:
            self._predicted(visit, experts, experts if bring is None else bring)

    def heard_keeps(self, worker: int, expert: t.ExpertId, stays: bool) -> None:
        self._keeps.append((worker, expert, stays))
        self.kept[expert] += stays

    def heard_left(self, expert: t.ExpertId) -> None:
        self.kept[expert] -= 1

    def heard_victim(self, worker: int, evictable: Collection[t.ExpertId], victim: t.ExpertId | None) -> None:
        assert evictable
        if victim is not None:
            self._victims.append((worker, victim))

    def heard_route(self, chosen: Rows, resident: Collection[int], routed: Rows) -> None:
        assert self._gate is not None, "the router is asked at gates only"
        here = {e.expert for e, a in self._before.items() if e.layer == self._gate.layer and a.loaded}
        everywhere = {
            a.load.expert.expert for a in self.slots.values() if a.loaded and a.load.expert.layer == self._gate.layer
        }
        assert here <= set(resident) <= everywhere, f"{here} are resident, the router is told {resident}"
        assert chosen == self.fired[self._gate].chosen
        self._routed = routed
        if routed != chosen:
            self.seen["routed"] += 1
            self.fired[self._gate].rows = dict(Counter(e for row in routed for e in row))

    def heard_split(self, missing: Collection[int], resident: Collection[int], hosted: Collection[int]) -> None:
        assert self._gate is not None
        fired = self.fired[self._gate]
        assert sorted([*missing, *resident]) == sorted(fired.rows)
        kept = {e.expert for e in self._before if e.layer == self._gate.layer}
        assert kept & set(fired.rows) <= set(resident), f"{kept} are there, {missing} are called missing"
        fired.hosted = set(hosted)

    def heard_warm(self, experts: list[t.ExpertId]) -> None:
        self.errands[self._request] = [expert for expert in experts if expert not in self._before]
        self.seen["warm"] += bool(experts)

    # --- facts ---

    def fact(self, event: t.Event, now: int) -> None:
        self._victims.clear()
        self._gate = self._routed = None
        self._before = {a.load.expert: a for a in self.slots.values() if a.keeps and not a.failed}
        self.smooth &= not isinstance(event, t.WorkerLost | t.LoadFailed | t.ComputeFailed)
        match event:
            case t.WorkerJoined():
                self.live[event.worker] = event.slots
                self.links[event.worker] = []
                self.seen["joined late"] += now > 0
                self.seen["host joined"] += event.slots == 0
            case t.WorkerLost():
                self._lost(event.worker)
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
            case t.TokenDecoded():
                self.books[event.request].prefilling = False
                self._request = event.request
            case t.Predicted():
                if self.books[event.request].open:
                    self._predicted(t.Visit(event.request, event.position, event.layer), event.experts, event.experts)
            case t.GateFired():
                self._fired(event, now)
            case t.LoadEnded() | t.LoadFailed():
                self._load_over(event, now)
            case t.ComputeEnded() | t.ComputeFailed():
                self._call_over(event)

    def _lost(self, worker: int) -> None:
        if self.live.pop(worker) == 0:
            for key in [key for key in self.hosting if key[0] == worker]:
                self._stop_hosting(key)
                self.seen["host lost at work"] += 1
        del self.links[worker]
        held = [place for place in self.slots if place[0] == worker]
        for place in held:
            attempt = self._give_up(place)
            self.seen["lost while computing" if attempt.uses and attempt.loaded else "lost while loading"] += 1
        self.seen["lost while idle"] += not held

    def _predicted(self, visit: t.Visit, experts: tuple[int, ...], bring: tuple[int, ...]) -> None:
        """`bring`: those that are to be in slots."""
        books = self.books[visit.request]
        if visit.position >= books.prompt and visit in books.activated:
            books.matched.setdefault(visit, frozenset(experts))
        if (visit.position, visit.layer) <= books.reached:
            books.late += 1
            self.seen["late prediction"] += 1
            return
        self.seen["second prediction"] += visit in self.standing
        self.seen["brings others"] += set(bring) != set(experts)
        if visit in self.standing and set(self.standing[visit]) != set(bring):
            self.clear = False  # whether one that goes then was displaced cannot be told
        self.standing[visit] = bring
        self.named_by[visit] = frozenset(experts)

    @property
    def predicts(self) -> bool:
        return self.shadow or self.plan.predictor != "none"

    def _fired(self, event: t.GateFired, now: int) -> None:
        visit, books = event.visit, self.books[event.visit.request]
        if not books.open:
            return
        brought = self.standing.pop(visit, None)
        named = self.named_by.pop(visit, None)
        books.reached = (visit.position, visit.layer)
        self._gate = visit
        self.fired[visit] = _Fired(now, dict(event.rows), event.chosen, frozenset(brought or ()), last_load=now)
        if not books.prefilling and self.predicts:
            books.activated[visit] = frozenset(dict(event.rows))
            if named is not None:
                books.matched[visit] = named

    def _load_over(self, event: t.LoadEnded | t.LoadFailed, now: int) -> None:
        attempt = self.loads.pop(event.load_id, None)
        if attempt is None:
            self.seen["stale fact"] += 1
        elif isinstance(event, t.LoadFailed):
            attempt.failed = True
            self.failures[attempt.load.expert] += 1
            self.seen["load failed"] += 1
        else:
            self.links[attempt.load.worker].remove(attempt)
            attempt.loaded, attempt.at = True, now
            self.bytes += event.nbytes
            for visit in attempt.uses:
                if visit in self.fired:
                    self.fired[visit].last_load = now
            for experts in self.errands.values():
                if attempt.load.expert in experts and (attempt.keeps or self._owner_is_errand(attempt)):
                    experts.remove(attempt.load.expert)
                    self.seen["warmed"] += 1

    def _call_over(self, event: t.ComputeEnded | t.ComputeFailed) -> None:
        if event.call_id not in self.calls:
            self.seen["stale fact"] += 1
            return
        attempt, visit = self.calls.pop(event.call_id)
        expert, host = attempt.load.expert, self.live[attempt.load.worker] == 0
        if isinstance(event, t.ComputeFailed):
            attempt.failed = True
            self.failures[expert] += 1
            self.seen["host failed" if host else "compute failed"] += 1
            if host:
                self._stop_hosting((attempt.load.worker, visit, expert.expert))
            return
        use = attempt.uses[visit]
        use.owed.discard(event.call_id)
        if use.owed:
            return
        del attempt.uses[visit]
        books = self.books[visit.request]
        self.fired[visit].done.add(expert.expert)
        self.computed += 1
        if host:
            del self.hosting[attempt.load.worker, visit, expert.expert]
            books.hosted += 1
            books.decode_hosted += not books.prefilling
            self.seen["computed by a host"] += 1
            return
        books.hits += attempt.owner != visit
        self.again += attempt.done
        self.seen["computed where it was"] += attempt.done
        attempt.done = True
        if not attempt.keeps:
            del self.slots[attempt.load.worker, attempt.load.slot]

    def _close(self, request: int) -> None:
        self.books[request].open = False
        for visit in [v for v in self.fired if v.request == request]:
            self.books[request].broken = True
            del self.fired[visit]
            for attempt in self.slots.values():
                if attempt.keeps:
                    for call in attempt.uses.pop(visit, _Use()).owed:
                        self.calls.pop(call, None)
            for key in [key for key in self.hosting if key[1] == visit]:
                self._stop_hosting(key)
        self.standing = {v: e for v, e in self.standing.items() if v.request != request}
        self.errands.pop(request, None)

    def _stop_hosting(self, key: tuple[int, t.Visit, int]) -> None:
        for use in self.hosting.pop(key).uses.values():
            for call in use.owed:
                self.calls.pop(call, None)

    def _give_up(self, place: tuple[int, int]) -> _Attempt:
        attempt = self.slots.pop(place)
        self.loads.pop(attempt.load.load_id, None)
        link = self.links.get(place[0], [])
        if attempt in link:
            link.remove(attempt)
        for use in attempt.uses.values():
            for call in use.owed:
                self.calls.pop(call, None)
        return attempt

    # --- commands ---

    def answered(self, commands: list[t.Command], core: Core, now: int) -> None:
        """These were given in answer to the last fact."""
        self._now = now
        fresh: set[int] = set()
        failing = {c.request for c in commands if isinstance(c, t.Fail)}
        present = self._present(commands)
        if self._gate is not None:
            rows = self.fired[self._gate].rows
            mine = [a.load.expert.expert for a in self.slots.values() if a.owner == self._gate]
            self.books[self._gate.request].unused += sum(expert not in rows for expert in mine)
        for c in commands:
            self._command(c, fresh, failing)
        if self._gate is not None and self._gate.request not in failing:
            self._judge_gate(self._gate, commands, present)
        assert not self._keeps, f"it was asked whether {self._keeps} stay, and nothing was loaded"
        self._settled(core)

    def _present(self, commands: list[t.Command]) -> set[int]:
        """Experts of the gate that has just fired whose bytes are where they can be computed."""
        visit = self._gate
        if visit is None:
            return set()
        there = {e.expert for e, a in self._before.items() if e.layer == visit.layer and a.loaded}
        fresh: set[tuple[int, int]] = set()
        for c in commands:
            if isinstance(c, t.Load):
                fresh.add((c.worker, c.slot))
            if not isinstance(c, t.Compute | t.Evict) or (c.worker, c.slot) in fresh:
                continue
            attempt = self.slots.get((c.worker, c.slot))
            if attempt is None or not attempt.loaded or attempt.load.expert != c.expert:
                continue
            if isinstance(c, t.Compute) and c.visit == visit:
                there.add(c.expert.expert)
            elif isinstance(c, t.Evict) and c.expert.layer == visit.layer:
                hosted = c.expert.expert in self.fired[visit].hosted and not attempt.keeps
                if (hosted or self.plan.forms) and attempt.owner == visit:
                    there.add(c.expert.expert)
        return there

    def _judge_gate(self, visit: t.Visit, commands: list[t.Command], present: set[int]) -> None:
        """A `Route` where one is due, and figures."""
        fired = self.fired.get(visit) or self._resumed[visit]
        books = self.books[visit.request]
        routes = [c for c in commands if isinstance(c, t.Route)]
        changed = self._routed is not None and self._routed != fired.chosen
        tells = self.plan.predictor == "attention"
        assert len(routes) == (changed or tells), f"{routes}, though the router said {self._routed}"
        for route in routes:
            assert route.visit == visit
            assert route.experts == (self._routed if changed else ())
            sent = not books.prefilling or self.plan.prefill != "in-turn"
            if sent and (self.owners or not (self.plan.forms or self.plan.split)):
                assert set(route.resident) == present & set(fired.rows)
            first = next((i for i, c in enumerate(commands) if isinstance(c, t.Compute)), len(commands))
            assert commands.index(route) < first
        if not books.prefilling:
            books.named += len(fired.rows)
            books.present += len(present & set(fired.rows))

    def _command(self, c: t.Command, fresh: set[int], failing: set[int]) -> None:
        """`fresh`: loads commanded in answer to the same fact. `failing`: requests that a Fail will follow for."""
        match c:
            case t.Load():
                self._load(c)
                fresh.add(c.load_id)
            case t.Evict():
                self._evict(c, failing)
            case t.Compute():
                self._compute(c, fresh)
            case t.Route():
                for row in c.experts:
                    assert row, f"{c}: nobody computes a row"
                    assert len(set(row)) == len(row), f"{c}: an expert twice in a row"
            case t.Resume():
                fired, books = self.fired.pop(c.visit), self.books[c.visit.request]
                self._resumed = {c.visit: fired}
                assert fired.done == set(fired.rows), f"{c} before {set(fired.rows) - fired.done} were computed"
                if books.prefilling:
                    books.prefill_stall += fired.last_load - fired.at
                else:
                    books.stall += fired.last_load - fired.at
            case t.Fail():
                assert self.books[c.request].open
                often = max(self.failures.values(), default=0) >= MAX_FAILURES
                slots = sum(self.live.values())
                lacks = self.plan.stay and slots < self.plan.all_experts
                assert not slots or often or lacks, f"{c} for no reason"
                why = "no worker" if not slots else "too few slots" if lacks else "too often"
                self.seen[f"failed: {why}"] += 1
                self._close(c.request)
            case t.Follow() | t.Align() | t.Unfollow():
                assert self.shadow, f"{c}, though there is no shadow"

    def _load(self, c: t.Load) -> None:
        assert 0 <= c.slot < self.live[c.worker], f"{c}: no such worker or slot"
        assert (c.worker, c.slot) not in self.slots, f"{c} into a taken slot"
        assert not c.form or self.plan.forms
        self._unused(c.load_id)
        self.seen[f"form {c.form or 'full'}"] += 1
        worker, expert, stays = self._keeps.popleft()
        assert (worker, expert) == (c.worker, c.expert), "who is loaded is not who was asked about"
        there = [a for a in self.slots.values() if a.load.expert == c.expert and a.keeps and not a.failed]
        assert not there, f"{c}: it is kept in {there[0].load} already"
        if self.plan.requests == 1 and self.books[1].prefilling and self.plan.prefill != "ahead":
            named = any(v.layer == c.expert.layer and c.expert.expert in f.rows for v, f in self.fired.items())
            assert named or self._wanted(c.expert) or self._errand(c.expert), f"{c} before its gate"
            self.seen["loaded in turn"] += 1
        link = self.links[c.worker]
        if not self._named(c.expert):
            assert len(link) < AHEAD, f"{c}: {len(link)} loads are on its link, and no gate waits for it"
        attempt = _Attempt(c, stays, owner=self._owner(c.expert))
        self.slots[c.worker, c.slot] = self.loads[c.load_id] = attempt
        link.append(attempt)
        self.loaded += 1
        self.decode_loaded += self.plan.requests == 1 and not self.books[1].prefilling

    def _named(self, expert: t.ExpertId) -> bool:
        return any(
            v.layer == expert.layer and expert.expert in f.rows and expert.expert not in f.done
            for v, f in self.fired.items()
        )

    def _wanted(self, expert: t.ExpertId) -> list[t.Visit]:
        """Visits whose gates have not fired and that are predicted to need it; prefill's plan left out."""
        return [v for v, experts in self.standing.items() if v.layer == expert.layer and expert.expert in experts]

    def _errand(self, expert: t.ExpertId) -> bool:
        return any(expert in experts for experts in self.errands.values())

    def _owner_is_errand(self, attempt: _Attempt) -> bool:
        return attempt.owner is None and not attempt.uses

    def _owner(self, expert: t.ExpertId) -> t.Visit | None:
        """For whom a load begins. Who is named comes first; where there are several, it cannot be told."""
        named = [
            v for v, f in self.fired.items()
            if v.layer == expert.layer and expert.expert in f.rows and expert.expert not in f.done
            and not any(v in a.uses and a.load.expert == expert for a in self.slots.values())
        ]  # fmt: skip
        wanted = named + self._wanted(expert)
        planned = [
            t.Visit(n, 0, expert.layer) for n, b in self.books.items()
            if b.open and b.prefilling and self.plan.prefill == "ahead" and expert.layer > b.reached[1]
        ]  # fmt: skip
        if len(wanted or planned) > 1 or (planned and wanted) or self._errand(expert):
            self.clear = self.owners = False
        return (wanted or planned or [None])[0]

    def _evict(self, c: t.Evict, failing: set[int]) -> None:
        assert c.worker in self.live, f"{c} to a worker that is gone"
        attempt = self._give_up((c.worker, c.slot))
        assert attempt.load.expert == c.expert
        for visit in attempt.uses:
            over = visit.request in failing or not self.books[visit.request].open
            assert attempt.failed or over, f"{c}: the gate named it"
        if attempt.failed:
            return
        wanted, victim = self._wanted(c.expert), (c.worker, c.expert) in self._victims
        planned = any(
            b.open and n not in failing and b.prefilling and self.plan.prefill == "ahead"
            and c.expert.layer > b.reached[1] and t.Visit(n, 0, c.expert.layer) not in self.standing
            for n, b in self.books.items()
        )  # fmt: skip
        owner = attempt.owner
        over = owner is not None and (
            owner.request in failing
            or not self.books[owner.request].open
            or (owner == self._gate and not attempt.keeps)
        )
        put_off = bool(wanted) or planned or self._errand(c.expert) or (attempt.keeps and not attempt.loaded)
        if victim:
            assert attempt.keeps
            self.seen["victim"] += 1
        elif put_off and (attempt.keeps or not over):
            self.preempted += 1
            self.seen["put off"] += 1
        elif attempt.keeps:
            self.seen["first of the idle"] += 1
        assert victim or not attempt.keeps or self.plan.forms or not self.plan.stay or not attempt.loaded, (
            f"{c}, though everything stays"
        )

    def _unused(self, number: int) -> None:
        assert number not in self.used, f"id {number} was used before"
        self.used.add(number)

    def _compute(self, c: t.Compute, fresh: set[int]) -> None:
        assert c.worker in self.live, f"{c} to a worker that is gone"
        fired, books = self.fired[c.visit], self.books[c.visit.request]
        layer, expert = c.expert
        assert layer == c.visit.layer
        assert expert not in fired.done, f"{c}: computed twice"
        host = self.live[c.worker] == 0
        if host:
            assert expert in fired.hosted, f"{c}: nobody said that the host computes it"
            assert (c.slot, c.evict) == (0, False)
            lying = _Attempt(t.Load(c.worker, 0, c.expert, 0), loaded=True, used=True)
            attempt = self.hosting.setdefault((c.worker, c.visit, expert), lying)
        else:
            attempt = self.slots[c.worker, c.slot]
            assert attempt.load.expert == c.expert, f"{c}: the slot holds {attempt.load.expert}"
            assert attempt.keeps or attempt.uses.keys() <= {c.visit}
        elsewhere = itertools.chain(self.slots.values(), self.hosting.values())
        others = [a for a in elsewhere if a is not attempt and c.visit in a.uses and a.load.expert == c.expert]
        assert not others, f"{c}: also under way in {others}"
        first, fresh_one = c.visit not in attempt.uses, not attempt.used and attempt.load.load_id in fresh
        use = attempt.uses.setdefault(c.visit, _Use())
        attempt.used = True
        self.seen["shared"] += first and len(attempt.uses) > 1
        if first and attempt.loaded and not host:
            turns = books.prefilling and self.plan.prefill == "in-turn"
            fired.last_load = max(fired.last_load, attempt.at if turns else self._now)
        if books.prefilling and self.plan.prefill == "in-turn" and not host:
            self._in_turn(c, attempt)
        assert c.start == use.sent < c.stop <= fired.rows[expert]
        assert c.stop - c.start <= self.plan.mini_batch
        leaves = c.stop == fired.rows[expert] and not attempt.keeps and not host
        assert c.evict == leaves, f"{c}: only the last rows evict, and only where nobody stays"
        self._unused(c.call_id)
        if fresh_one and not books.prefilling:
            missed = expert not in fired.predicted and expert not in fired.hosted
            books.reloads += missed
            self.seen["reload" if missed else "predicted, loaded late"] += 1
        self.seen["several chunks"] += c.start > 0
        use.sent = c.stop
        use.owed.add(c.call_id)
        self.calls[c.call_id] = attempt, c.visit

    def _in_turn(self, c: t.Compute, attempt: _Attempt) -> None:
        assert attempt.loaded, f"{c} before its load has ended"
        if self.plan.requests == 1 and self.owners:
            under_way = [
                a.load for a in self.slots.values()
                if a.load.expert.layer == c.visit.layer and not a.loaded
                and a.load.expert.expert in self.fired[c.visit].rows and (a.owner == c.visit or a.keeps)
                and a.load.expert.expert not in self.fired[c.visit].hosted
            ]  # fmt: skip
            assert not under_way, f"{c} before {under_way} have ended"

    # --- after each fact's commands, and at the end ---

    def _settled(self, core: Core) -> None:
        """What must hold whenever all commands of a fact have been given."""
        named = Counter(
            t.ExpertId(v.layer, e) for v, f in self.fired.items() for e in f.rows
            if e not in f.done and not any(key[1:] == (v, e) for key in self.hosting)
        )  # fmt: skip
        predicted = Counter(t.ExpertId(v.layer, e) for v, experts in self.standing.items() for e in set(experts))
        wanted = named + predicted
        for experts in self.errands.values():
            wanted.update(experts)
        for number, books in self.books.items():
            if books.open and books.prefilling and self.plan.prefill == "ahead":
                wanted.update(
                    t.ExpertId(layer, e)
                    for layer in range(self.plan.layers) for e in range(self.plan.experts)
                    if layer > books.reached[1] and t.Visit(number, 0, layer) not in self.standing
                )  # fmt: skip
        resident = Counter(attempt.load.expert for attempt in self.slots.values())
        passing = Counter(
            a.load.expert for a in self.slots.values() if not a.keeps and (a.loaded or not self._owner_is_errand(a))
        )
        assert passing <= wanted, f"held though nobody wants it: {passing - wanted}"
        kept = Counter(a.load.expert for a in self.slots.values() if a.keeps)
        assert max(kept.values(), default=1) == 1, "kept in two slots"
        assert +self.kept == kept, f"kept: {kept}; told: {+self.kept}"
        for attempt in (*self.slots.values(), *self.hosting.values()):
            for visit, use in attempt.uses.items():
                rows = self.fired[visit].rows[attempt.load.expert.expert]
                assert use.sent == rows, f"{attempt}: only {use.sent} of {rows} rows sent"
        self._links_are_clear()
        hopeless = Counter({e: n for e, n in predicted.items() if self.failures[e] >= MAX_FAILURES})
        lacking = named.keys() - resident.keys()
        assert not lacking or not self.plan.stay, f"named, not loaded, and there is room: {lacking}"
        self._nobody_waits(named, predicted - hopeless, resident)
        assert core.workers == sorted(self.live)

    def _links_are_clear(self) -> None:
        """No load that a gate waits for is behind one that is only predicted."""
        for link in self.links.values():
            urgent = [place for place, attempt in enumerate(link) if attempt.uses]
            for attempt in link[: urgent[-1]] if urgent else ():
                assert self._named(attempt.load.expert), f"{attempt.load} is in the way of {link[urgent[-1]].load}"
            self.seen["two on a link"] += len(link) > 1

    def _nobody_waits(
        self, named: Counter[t.ExpertId], predicted: Counter[t.ExpertId], resident: Counter[t.ExpertId]
    ) -> None:
        held = {w: [a for (number, _), a in self.slots.items() if number == w] for w, n in self.live.items() if n}
        full = [w for w in held if len(held[w]) == self.live[w]]
        busy = [w for w in held if len(self.links[w]) >= AHEAD]
        waits = named + predicted - resident if self.plan.policy == "none" else named.keys() - resident.keys()
        if waits:
            assert full or busy, "something is wanted and every worker has a free slot and an idle link"
        if self.plan.prefill == "in-turn":  # what is loaded in turn is named, though not sent yet
            return
        begun = Counter(a.load.expert for a in self.slots.values() for _ in a.uses)  # who stays serves several at once
        if named - begun:
            refuses = self.plan.policy not in (
                "none",
                "all",
                "lru",
            )  # they may have nobody make room while something is computed
            stuffed = [w for w in full if (any if refuses else all)(a.uses for a in held[w])]
            assert stuffed, "a named expert waits though every worker could make room"

    def finish(self, core: Core) -> None:
        """Everything is over: nothing may be left, and the core's ledgers must say what the referee's books say."""
        assert all(attempt.keeps for attempt in self.slots.values()), f"still resident: {self.slots}"
        assert not any(attempt.uses for attempt in self.slots.values())
        assert not self.hosting
        assert not self.fired
        assert not any(books.open for books in self.books.values())
        assert core.idle()
        for worker in core.snapshot().workers.values():
            assert worker.kept == {expert for expert in worker.slots if expert is not None}
        stats = list(core.stats.values())
        assert sum(one.loads for one in stats) == self.loaded
        assert sum(one.bytes_loaded for one in stats) == self.bytes
        hits = sum(one.hits for one in stats)
        assert self.again <= hits <= self.computed  # what was computed from a load that had served already is a hit
        assert self.plan.policy != "none" or hits == 0
        self.seen["hits"] += hits
        self.seen["displaced"] += sum(one.preempted for one in stats)
        self.seen["unused"] += sum(one.unused for one in stats)
        if self.clear:
            self.seen["clear"] += 1
            assert sum(one.preempted for one in stats) == self.preempted
            assert sum(one.unused for one in stats) == sum(books.unused for books in self.books.values())
        if self.plan.requests == 1:
            assert core.stats[1].decode_loads == self.decode_loaded
        for number, books in self.books.items():
            self._audit(core, number, books)

    def _audit(self, core: Core, number: int, books: _Books) -> None:
        stats = core.stats[number]
        assert stats.late == books.late
        if self.owners or self.plan.policy == "none":
            assert stats.reloads == books.reloads
        assert (stats.host_calls, stats.decode_host_calls) == (books.hosted, books.decode_hosted)
        assert stats.named == books.named
        if self.owners or not (self.plan.forms or self.plan.split):
            assert stats.present == books.present
        if self.clear and self.smooth:
            assert stats.hits == books.hits
        if not books.broken:
            assert stats.stall_s == books.stall
            if self.plan.prefill != "in-turn" or (self.smooth and self.plan.policy in ("none", "all")):
                assert stats.prefill_stall_s == books.prefill_stall
        self.seen["stall"] += books.stall > 0
        # Equations (2) and (3): what was activated, token by token, and how much of it some prediction had named.
        pairs = {
            v: (len(experts & books.matched[v]), len(experts))
            for v, experts in books.activated.items()
            if v in books.matched
        }
        stats.close()
        assert stats.unpredicted == sum(len(e) for v, e in books.activated.items() if v not in books.matched)
        self.seen["unpredicted"] += stats.unpredicted > 0
        for n in range(self.plan.answer):
            of_token = [pair for visit, pair in pairs.items() if visit.position == books.prompt + n]
            tally = stats.by_index[n] if n < len(stats.by_index) else None
            correct, activated = sum(c for c, _ in of_token), sum(a for _, a in of_token)
            assert ((tally.correct, tally.activated) if tally else (0, 0)) == (correct, activated)
        total = sum(a for _, a in pairs.values())
        assert stats.overall.recall == (sum(c for c, _ in pairs.values()) / total if total else None)
        self.seen["recall between 0 and 1"] += bool(total) and 0 < sum(c for c, _ in pairs.values()) < total


# --- choices ----------------------------------------------------------------------------------------------------


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


class LayerQuota(LastUsed):
    """At most two of a layer, one of them makes room. What was predicted stays, and what prefill loaded. When prefill
    is over the first two of each layer are to be there."""

    def __init__(self, shape: t.ModelShape, quota: int = 2) -> None:
        super().__init__()
        self.shape, self.quota = shape, quota
        self.there: set[t.ExpertId] = set()
        self.prefill = True

    def observed(self, visit: t.Visit, named: Any, scores: Any, prefill: bool) -> None:
        self.prefill = prefill

    def keeps(self, worker: int, expert: t.ExpertId, predicted: bool) -> bool:
        stays = predicted or self.prefill
        self.there |= {expert} if stays else set()
        return stays

    def left(self, worker: int, expert: t.ExpertId) -> None:
        super().left(worker, expert)
        self.there.discard(expert)

    def full(self, wanted: t.ExpertId) -> bool:
        return sum(expert.layer == wanted.layer for expert in self.there) >= self.quota

    def victim(self, worker: int, wanted: t.ExpertId, evictable: Collection[t.ExpertId]) -> t.ExpertId | None:
        mine = [expert for expert in evictable if expert.layer == wanted.layer] if self.full(wanted) else evictable
        return super().victim(worker, wanted, mine) if mine else None

    def warm(self, slots: int) -> list[t.ExpertId]:
        firsts = [t.ExpertId(layer, e) for e in range(self.quota) for layer in self.shape.layers]
        return [expert for expert in firsts if expert.expert < self.shape.experts][:slots]


class Foreseer(Silent):
    """Says something whenever it is asked, sometimes for a visit that is over, sometimes only what is to be brought."""

    def __init__(self, plan: Plan, foresight: Any) -> None:
        super().__init__(shape_of(plan))
        self.plan, self.foresight = plan, foresight

    def begun(self, visit: t.Visit, rows: int, prefill: bool) -> list[Forecast]:
        return self._guess(Random(f"b{self.plan.seed}{visit}"), visit, prefill, 0.5)

    def fired(self, visit: t.Visit, named: Any, scores: Any, prefill: bool) -> list[Forecast]:
        rng = Random(f"f{self.plan.seed}{visit}")
        position = visit.position + (self.plan.prompt if prefill else 1) if rng.random() < 0.5 else visit.position
        other = t.Visit(visit.request, position, rng.randrange(self.plan.layers))
        return self._guess(rng, other, prefill and position == visit.position, 0.3)

    def _guess(self, rng: Random, visit: t.Visit, prefill: bool, chance: float) -> list[Forecast]:
        if rng.random() > chance or (prefill and self.plan.prefill == "ahead"):
            return []
        return [Forecast(visit, tuple(rng.sample(range(self.plan.experts), self.plan.top_k)))]

    def foreseen(self, visit: t.Visit, scores: Any, resident: Collection[int], prefill: bool) -> list[Forecast]:
        if prefill and self.plan.prefill == "ahead":
            return []
        rng = Random(f"s{self.plan.seed}{visit}")
        best = sorted(range(self.plan.experts), key=lambda e: -scores[0][e])[: self.plan.top_k]
        how = rng.randrange(4)
        bring = (None, tuple(e for e in best if e not in resident), (), tuple(reversed(best)))[how]
        return [Forecast(visit, tuple(best), bring)]


class Wanderer:
    """Takes an expert that is there in place of the last of a row's, or does without the last."""

    exact, wants_scores = False, True

    def route(self, chosen: Rows, scores: Any, resident: Collection[int]) -> Rows:
        assert len(scores) == len(chosen)
        return tuple(self._row(row, sorted(resident)) for row in chosen)

    def _row(self, row: tuple[int, ...], resident: list[int]) -> tuple[int, ...]:
        rng = Random(f"{row}{resident}")
        other = [e for e in resident if e not in row]
        if other and rng.random() < 0.5:
            return (*row[:-1], rng.choice(other))
        return row[:-1] if len(row) > 1 and rng.random() < 0.3 else row


class SomeHosted:
    """The host takes any of the missing, and rarely one that is there."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def host(self, missing: Any, resident: Any, costs: Any, prefill: bool) -> set[int]:
        rng = Random(f"{self.seed}{sorted(missing.items())}{sorted(resident.items())}{prefill}")
        return {e for e in missing if rng.random() < 0.5} | {e for e in resident if rng.random() < 0.1}


class TwoForms:
    """The best of a row is to be whole; anything whole will do."""

    forms, exact, wants_scores = (FULL, INT4), False, True

    def form(self, wanted: Importance) -> str:
        return FULL if wanted.rank == 0 and wanted.rows else INT4

    def serves(self, held: str, wanted: Importance) -> bool:
        return held == FULL or self.form(wanted) == INT4


class Overheard:
    """One of a strategy's objects; the referee hears what it is asked and what it answers. `tells`: by method, what is
    said to whom with the arguments and the answer."""

    def __init__(self, inner: Any, **tells: Callable[..., None]) -> None:
        self._inner, self._tells = inner, tells

    def __getattr__(self, name: str) -> Any:
        told, found = self._tells.get(name), getattr(self._inner, name)
        if told is None:
            return found

        def called(*args: Any) -> Any:
            answer = found(*args)
            if not isinstance(answer, bool | tuple | set | None):
                answer = list(answer)
            told(*args, answer)
            return answer

        return called


def overheard(referee: Referee, predictor: Any, policy: Any, router: Any, split: Any, precision: Any) -> list[Any]:
    def forecast(*said: Any) -> None:
        referee.heard_forecasts(said[-1])

    return [
        Overheard(predictor, begun=forecast, fired=forecast, foreseen=forecast),
        Overheard(
            policy, keeps=lambda w, e, _, stays: referee.heard_keeps(w, e, stays),
            left=lambda w, e, _: referee.heard_left(e), victim=lambda w, _, among, e: referee.heard_victim(w, among, e),
            warm=lambda _, experts: referee.heard_warm(experts),
        ),
        Overheard(router, route=lambda chosen, _, here, routed: referee.heard_route(chosen, here, routed)),
        Overheard(split, host=lambda missing, here, _, prefill, hosted: referee.heard_split(missing, here, hosted)),
        precision,
    ]  # fmt: skip


def residency_of(plan: Plan, shape: t.ModelShape) -> Residency:
    """One of the catalogue's."""
    return registry.residency_of(Choices(shape, plan.group, residency=plan.policy))


POLICIES: dict[str, Callable[[t.ModelShape], Residency]] = {
    "none": lambda shape: Cacheless(),
    "all": lambda shape: Everything(),
    "lru": lambda shape: LastUsed(),
    "even": lambda shape: EvenStay(),
    "quota": LayerQuota,
}


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
        self.host = world.plan.slots[number % len(world.plan.slots)] == 0
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
        elif self.host:
            self.work.append((_Ticket(t.Load(self.number, 0, c.expert, 0), loaded=True), c))
            self.compute()
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

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rng, self.now = plan, Random(plan.seed), 0
        self.referee = Referee(plan)
        self.core = self.new_core(self.referee)
        self.log: list[tuple[t.Event, int, list[t.Command]]] = []
        self.workers: dict[int, _Worker] = {}
        self.mains: dict[int, _Main] = {}
        self._heap: list[tuple[int, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._inbox: deque[t.Event] = deque()
        self._posting = False

    def new_core(self, referee: Referee | None = None) -> Core:
        """`referee`: who hears what the strategy's objects say."""
        plan = self.plan
        shape = shape_of(plan)
        chance, silent = plan.predictor == "chance", plan.predictor == "none"
        foreseer = Silent(shape) if silent else Foreseer(plan, plan.predictor)
        parts: list[Any] = [
            RandomPredictor(shape, plan.seed) if chance else foreseer,
            POLICIES[plan.policy](shape) if plan.policy in POLICIES else residency_of(plan, shape),
            Wanderer() if plan.router else TopK(),
            SomeHosted(plan.seed) if plan.split else DeviceOnly(),
            TwoForms() if plan.forms else Full(),
        ]
        if referee is not None:
            parts = overheard(referee, *parts)
        strategy = Strategy(*parts, predicts=not silent)
        return Core(
            shape, RoundRobin(plan.group), Alignment(*plan.periods), plan.mini_batch, strategy, plan.prefill
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
            self.referee.answered(commands, self.core, self.now)
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
        first = 0 if main.index < 0 else plan.prompt + main.index
        positions = range(plan.prompt) if main.index < 0 else range(first, first + 1)
        routes = [self.route(main.number, position, main.layer) for position in positions]
        rows = Counter(expert for route in routes for expert in route)
        chosen = tuple(tuple(route) for route in routes)
        scores = self.scores(routes) if self.core.strategy.wants_scores else ()
        self.post(t.GateFired(t.Visit(main.number, first, main.layer), tuple(sorted(rows.items())), chosen, scores))
        if not main.over and self.core.strategy.predictor.foresight is not None:
            self.foresee(main, first, positions)

    def scores(self, routes: list[list[int]]) -> tuple[tuple[float, ...], ...]:
        """As the routes have it: the k best of each row in their order."""
        k = self.plan.top_k
        return tuple(
            tuple((2.0 * k - route.index(e) if e in route else 1 / (2 + e)) for e in range(self.plan.experts))
            for route in routes
        )

    def foresee(self, main: _Main, first: int, positions: range) -> None:
        """What the main model tells a predictor, now and then too late, and mostly right."""
        layer, at = main.layer + 1, first
        if self.plan.predictor == "token":
            layer, at, positions = main.layer, positions[-1] + 1, range(1)
        if layer == self.plan.layers:
            return
        routes = [self.route(main.number, at if self.plan.predictor == "token" else p, layer) for p in positions]
        if self.rng.random() > self.plan.accuracy:
            routes = [sorted(route, reverse=True) for route in self.shuffled(routes)]
        event = t.Foreseen(main.number, at, layer, self.scores(routes))
        self.at(self.ticks(2 * self.plan.main), lambda: self.post(event))

    def shuffled(self, routes: list[list[int]]) -> list[list[int]]:
        return [self.rng.sample(range(self.plan.experts), len(route)) for route in routes]

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


def live(plan: Plan) -> World:
    """Lives through a plan, referee and all, and replays it."""
    world = World(plan).run()
    world.replay()
    return world

"""What the referee of the random worlds knows: written down from facts and commands, without a look into the core."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from scheduler import types as t
from scheduler.policies.routers import Chosen
from support.scheduling.plan import Plan

Expert = tuple[int, int]
"""(layer, number), equal to the `ExpertId` of the same two."""


@dataclass(slots=True, eq=False)
class Use:
    """What was sent to be computed for one visit, and not answered."""

    sent: int = 0
    owed: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Attempt:
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
    uses: dict[t.Visit, Use] = field(default_factory=dict)

    @property
    def warms_up(self) -> bool:
        """It may have been begun for a warm-up: no visit is known that it was begun for, or that uses it."""
        return self.owner is None and not self.uses


@dataclass(slots=True, eq=False)
class Gate:
    """A gate that has fired, until its layer is resumed. `at`: when. `rows`: by expert, after the router. `chosen`: the
    gate's own choice, for each row. `predicted`: by the last prediction before the gate."""

    at: int
    rows: dict[int, int]
    chosen: Chosen
    predicted: frozenset[int]
    hosted: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    last_load: int = 0


@dataclass(slots=True, eq=False)
class RequestBooks:
    """The referee's own figures of one request, named as those of `RequestStats`. `broken`: it ended in a layer.
    `activated`, `matched`: by decode visits, what the gate named and what a prediction did."""

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


class Books:
    """Who is where, who waits for what, and figures. `seen`: which of the interesting things have happened, how often.

    `live`: slots by worker. `slots`: by (worker, slot). `links`: by worker, loads under way in the order of asking.
    `hosting`: what host places compute, by (visit, expert). `loads`, `calls`: by id, those without an answer. `kept`:
    experts that the policy was told to keep. `predictions`: by visits whose gates have not fired, experts that are to
    be in slots. `asked_warm`: by request, what its policy asked for when prefill was over; `warm_ups`: of that, what
    has not been there since.

    `owners`, `clear`, `smooth`: see `support.scheduling.referee`.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.now = 0
        self.gate: t.Visit | None = None
        """Of the fact being answered, where it is a gate."""
        self.before: dict[Expert, Attempt] = {}
        """What was kept when a gate fired or a token was decoded."""
        self.shadow = False
        self.live: dict[int, int] = {}
        self.costs: dict[int, dict[str, float]] = {}
        """Worker -> form -> seconds until an expert in it can compute; empty where unknown."""
        self.slots: dict[tuple[int, int], Attempt] = {}
        self.links: dict[int, list[Attempt]] = {}
        self.hosting: dict[tuple[t.Visit, int], Attempt] = {}
        self.loads: dict[int, Attempt] = {}
        self.calls: dict[int, tuple[Attempt, t.Visit]] = {}
        self.requests: dict[int, RequestBooks] = {}
        self.gates: dict[t.Visit, Gate] = {}
        self.predictions: dict[t.Visit, frozenset[int]] = {}
        self.named_by: dict[t.Visit, frozenset[int]] = {}
        self.asked_warm: dict[int, set[t.ExpertId]] = {}
        self.warm_ups: dict[int, list[Expert]] = {}
        self.decoding = -1
        """The request whose token was decoded last."""
        self.failures: Counter[Expert] = Counter()
        self.kept: dict[Expert, int] = {}
        self.loaded = self.decode_loaded = self.bytes = self.computed = self.again = self.preempted = 0
        self.seen: Counter[str] = Counter()
        self.owners = True
        self.clear = not plan.forms
        self.smooth = True

    # --- who wants what -----------------------------------------------------------------------------------------------

    @property
    def predicts(self) -> bool:
        return self.shadow or self.plan.predictor != "none"

    @property
    def plans_ahead(self) -> bool:
        """Prefill's experts are all wanted before their gates."""
        return self.plan.prefill == "ahead"

    def named(self, expert: t.ExpertId) -> list[t.Visit]:
        """Visits whose gates have named it, and for which it was not computed."""
        layer, number = expert
        return [v for v, g in self.gates.items() if v.layer == layer and number in g.rows and number not in g.done]

    def predicted(self, expert: t.ExpertId) -> list[t.Visit]:
        """Visits whose gates have not fired and that are predicted to need it; prefill's plan left out."""
        layer, number = expert
        return [v for v, experts in self.predictions.items() if v.layer == layer and number in experts]

    def planned(self, layer: int) -> list[int]:
        """Requests whose prefill wants every expert of that layer: nobody predicts prefill that loads ahead."""
        if not self.plans_ahead:
            return []
        return [n for n, one in self.requests.items() if one.open and one.prefilling and layer > one.reached[1]]

    def warming_up(self, expert: Expert) -> int:
        """How many requests wait for it to be there, since their policies asked for it."""
        return sum(expert in experts for experts in self.warm_ups.values())

    # --- facts --------------------------------------------------------------------------------------------------------

    def fact(self, event: t.Event, now: int) -> None:
        self.now, self.gate = now, None
        if isinstance(event, t.GateFired | t.TokenDecoded):
            self.before = {a.load.expert: a for a in self.slots.values() if a.keeps and not a.failed}
        match event:
            case t.LoadEnded() | t.LoadFailed():
                self._load_over(event)
            case t.ComputeEnded() | t.ComputeFailed():
                self._call_over(event)
            case t.Predicted():
                if self.requests[event.request].open:
                    self.predict(t.Visit(event.request, event.position, event.layer), event.experts, event.experts)
            case t.GateFired():
                self._gate_fired(event)
            case t.StepStarted():
                for each in event.passes:
                    one = self.requests[each.request]
                    one.prefilling, one.reached = each.prefill, (each.position, -1)
            case t.TokenDecoded():
                self.requests[event.request].prefilling = False
                self.decoding = event.request
            case t.WorkerJoined():
                self.live[event.worker] = event.slots
                self.costs[event.worker] = {cost.form: cost.load_s + cost.restore_s for cost in event.forms}
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
                self.requests[event.request] = RequestBooks(event.prompt_tokens)
            case t.RequestClosed():
                one = self.requests[event.request]
                if one.open and any(v.request == event.request for v in self.gates):
                    self.seen["closed in a layer"] += 1
                self.close(event.request)

    def pays(self, worker: int, form: str) -> bool:
        """Loading the form there and restoring it is faster than loading the full one, as far as that is known."""
        costs = self.costs[worker]
        return not form or not costs or costs[form] < costs[""]

    def _lost(self, worker: int) -> None:
        self.smooth = False
        if self.live.pop(worker) == 0:
            for key in [key for key, attempt in self.hosting.items() if attempt.load.worker == worker]:
                self.stop_hosting(key)
                self.seen["host lost at work"] += 1
        del self.links[worker]
        held = [place for place in self.slots if place[0] == worker]
        for place in held:
            attempt = self.give_up(place)
            self.seen["lost while computing" if attempt.uses and attempt.loaded else "lost while loading"] += 1
        self.seen["lost while idle"] += not held

    def predict(self, visit: t.Visit, experts: tuple[int, ...], bring: tuple[int, ...]) -> None:
        """`bring`: those that are to be in slots."""
        one = self.requests[visit.request]
        if visit.position >= one.prompt and visit in one.activated:
            one.matched.setdefault(visit, frozenset(experts))
        if (visit.position, visit.layer) <= one.reached:
            one.late += 1
            self.seen["late prediction"] += 1
            return
        wanted = frozenset(bring)
        self.seen["second prediction"] += visit in self.predictions
        self.seen["brings others"] += wanted != set(experts)
        if self.predictions.get(visit, wanted) != wanted:
            self.clear = False  # whether one that goes then was pre-empted cannot be told
        self.predictions[visit] = wanted
        self.named_by[visit] = frozenset(experts)

    def _gate_fired(self, event: t.GateFired) -> None:
        visit, one = event.visit, self.requests[event.visit.request]
        if not one.open:
            return
        predicted = self.predictions.pop(visit, frozenset())
        named = self.named_by.pop(visit, None)
        one.reached = (visit.position, visit.layer)
        self.gate = visit
        self.gates[visit] = Gate(self.now, dict(event.rows), event.chosen, predicted, last_load=self.now)
        if not one.prefilling and self.predicts:
            one.activated[visit] = frozenset(dict(event.rows))
            if named is not None:
                one.matched[visit] = named

    def _load_over(self, event: t.LoadEnded | t.LoadFailed) -> None:
        failed = isinstance(event, t.LoadFailed)
        self.smooth &= not failed
        attempt = self.loads.pop(event.load_id, None)
        if attempt is None:
            self.seen["stale fact"] += 1
        elif isinstance(event, t.LoadFailed):
            attempt.failed = True
            self.failures[attempt.load.expert] += 1
            self.seen["load failed"] += 1
        else:
            self.links[attempt.load.worker].remove(attempt)
            attempt.loaded, attempt.at = True, self.now
            self.bytes += event.nbytes
            for visit in attempt.uses:
                if visit in self.gates:
                    self.gates[visit].last_load = self.now
            for experts in self.warm_ups.values():
                if attempt.load.expert in experts and (attempt.keeps or attempt.warms_up):
                    experts.remove(attempt.load.expert)
                    self.seen["warmed"] += 1

    def _call_over(self, event: t.ComputeEnded | t.ComputeFailed) -> None:
        failed = isinstance(event, t.ComputeFailed)
        self.smooth &= not failed
        if event.call_id not in self.calls:
            self.seen["stale fact"] += 1
            return
        attempt, visit = self.calls.pop(event.call_id)
        expert, host = attempt.load.expert, self.live[attempt.load.worker] == 0
        if failed:
            attempt.failed = True
            self.failures[expert] += 1
            self.seen["host failed" if host else "compute failed"] += 1
            if host:
                self.stop_hosting((visit, expert.expert))
            return
        use = attempt.uses[visit]
        use.owed.discard(event.call_id)
        if not use.owed:
            self._computed(attempt, visit, host)

    def _computed(self, attempt: Attempt, visit: t.Visit, host: bool) -> None:
        """All rows of one visit have come back."""
        del attempt.uses[visit]
        one, number = self.requests[visit.request], attempt.load.expert.expert
        self.gates[visit].done.add(number)
        self.computed += 1
        if host:
            del self.hosting[visit, number]
            one.hosted += 1
            one.decode_hosted += not one.prefilling
            self.seen["computed by a host"] += 1
            return
        one.hits += attempt.owner != visit
        self.again += attempt.done
        self.seen["computed where it was"] += attempt.done
        attempt.done = True
        if not attempt.keeps:
            del self.slots[attempt.load.worker, attempt.load.slot]

    # --- what ends ----------------------------------------------------------------------------------------------------

    def close(self, request: int) -> None:
        one = self.requests[request]
        one.open = False
        for visit in [v for v in self.gates if v.request == request]:
            one.broken = True
            del self.gates[visit]
            for attempt in self.slots.values():
                if attempt.keeps:
                    for call in attempt.uses.pop(visit, Use()).owed:
                        self.calls.pop(call, None)
            for key in [key for key in self.hosting if key[0] == visit]:
                self.stop_hosting(key)
        self.predictions = {v: e for v, e in self.predictions.items() if v.request != request}
        self.asked_warm.pop(request, None)
        self.warm_ups.pop(request, None)

    def stop_hosting(self, key: tuple[t.Visit, int]) -> None:
        for use in self.hosting.pop(key).uses.values():
            for call in use.owed:
                self.calls.pop(call, None)

    def give_up(self, place: tuple[int, int]) -> Attempt:
        attempt = self.slots.pop(place)
        self.loads.pop(attempt.load.load_id, None)
        link = self.links.get(place[0], [])
        if attempt in link:
            link.remove(attempt)
        for use in attempt.uses.values():
            for call in use.owed:
                self.calls.pop(call, None)
        return attempt

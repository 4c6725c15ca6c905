"""What the referee of the random worlds knows: written down from facts and commands, without a look into the core."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from scheduler import types as t
from scheduler.held import experts_of
from support.worlds.audits import AuditBooks
from support.worlds.plan import Plan
from support.worlds.records import NOBODY, Attempt, Expert, Gate, Range, Reading, RequestBooks, Use


class Books:
    """Who is where, who waits for what, and figures. `seen`: which of the interesting things have happened, how often.

    `live`: slots by worker. `slots`: by (worker, slot). `links`: by worker, loads under way in the order of asking.
    `hosting`: what host places compute, by (visit, expert). `loads`, `calls`: by id, those without an answer. `kept`:
    experts that the policy was told to keep. `predictions`: by rows and layers whose gates are not united, experts that
    are to be in slots. `asked_warm`: by request, what its policy asked for when prefill was over; `warm_ups`: of that,
    what has not been there since. `step`: the passes of the step, by request. `united`: the visits whose gates the last
    fact has united.

    `smooth`: see `support.worlds.referee`. A world is `clear` in `seen` if the books tell its figures exactly.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.now = 0
        self.step: dict[int, t.Pass] = {}
        self.united: list[t.Visit] = []
        self.dropped: set[t.ExpertId] = set()
        """What a prediction that the last fact has replaced had named."""
        self.before: list[Attempt] = []
        """What was in slots when the last fact came."""
        self.shadow = False
        self.live: dict[int, int] = {}
        self.costs: dict[int, dict[str, float]] = {}
        """Worker -> form -> seconds until an expert in it can compute; empty where unknown."""
        self.slots: dict[tuple[int, int], Attempt] = {}
        self.held: dict[int, frozenset[t.ExpertId] | None] = {}
        """Worker -> its part of the store; None: all."""
        self.links: dict[int, list[Attempt]] = {}
        self.hosting: dict[tuple[t.Visit, int], Attempt] = {}
        self.loads: dict[int, Attempt] = {}
        self.calls: dict[int, tuple[Attempt, t.Visit]] = {}
        self.requests: dict[int, RequestBooks] = {}
        self.gates: dict[t.Visit, Gate] = {}
        self.predictions: dict[t.Visit, frozenset[int]] = {}
        self.asked_warm: dict[int, set[t.ExpertId]] = {}
        self.warm_ups: dict[int, list[Expert]] = {}
        self.unwarmed: set[int] = set()
        """Requests whose prefill is over, and whose policy was not asked yet what is to be there."""
        self.failures: Counter[Expert] = Counter()
        """Of loads and computations, and losses of workers that may have loaded or computed it."""
        self.suspects: set[Expert] = set()
        """What workers that were lost may have loaded or computed."""
        self.kept: dict[Expert, int] = {}
        self.loaded = self.decode_loaded = self.bytes = self.computed = self.again = 0
        self.reloads, self.hits, self.unused, self.preempted = Range(), Range(), Range(), Range()
        self.seen: Counter[str] = Counter()
        self.audits = AuditBooks(self)
        self.smooth = True

    # --- who wants what -----------------------------------------------------------------------------------------------

    @property
    def predicts(self) -> bool:
        return self.shadow or self.plan.predictor != "none"

    @property
    def short(self) -> bool:
        """Workers are missing: those that are there have too few slots."""
        slots = sum(self.live.values())
        return not slots or (self.plan.stay and slots < self.plan.all_experts)

    def holds(self, worker: int, expert: Expert) -> bool:
        part = self.held[worker]
        return part is None or expert in part

    def has_host(self, expert: Expert) -> bool:
        """A host place holds it."""
        return any(not slots and self.holds(worker, expert) for worker, slots in self.live.items())

    def is_unheld(self, expert: Expert) -> bool:
        """No worker with slots holds it."""
        return not any(slots and self.holds(worker, expert) for worker, slots in self.live.items())

    def unheld(self) -> list[t.Visit]:
        """Visits whose gates have named what no worker holds and what is in no slot for them."""
        if not self.plan.replicas:
            return []
        return [
            v
            for v, g in self.gates.items()
            for number in (g.rows if g.united else ())
            if self.is_unheld(one := t.ExpertId(v.layer, number)) and v in self.unsent(one)
        ]

    @property
    def lacks(self) -> bool:
        """Requests wait for workers that are missing."""
        return self.short or bool(self.unheld())

    @property
    def plans_ahead(self) -> bool:
        """Prefill's experts are all wanted before their gates."""
        return self.plan.prefill == "ahead"

    def named(self, expert: t.ExpertId) -> list[t.Visit]:
        """Visits whose united gates have named it, and for which it was not computed in a slot."""
        layer, number = expert
        return [
            v
            for v, g in self.gates.items()
            if g.united
            and v.layer == layer
            and number in g.rows
            and number not in g.done
            and (v, number) not in self.hosting
        ]

    def predicted(self, expert: t.ExpertId) -> list[t.Visit]:
        """Rows whose gates are not united and that are predicted to need it; prefill's plan left out."""
        layer, number = expert
        return [v for v, experts in self.predictions.items() if v.layer == layer and number in experts]

    def planned(self, layer: int) -> list[int]:
        """Requests whose prefill wants every expert of that layer: nobody predicts prefill that loads ahead."""
        if not self.plans_ahead:
            return []
        return [
            n
            for n, one in self.requests.items()
            if one.open and one.prefilling and one.stop > one.first and layer > one.united
        ]

    def warming_up(self, expert: Expert) -> int:
        """How many requests wait for it to be there, since their policies asked for it."""
        return sum(expert in experts for experts in self.warm_ups.values())

    def dues(self, expert: t.ExpertId) -> set[tuple[int, int]]:
        """The different times at which it may be needed: 0 and how many steps from now; or the request, where that is
        not in the step and nobody knows when it is again."""
        found = {(0, 0)} if self.named(expert) or self.planned(expert.layer) else set[tuple[int, int]]()
        warm = {(-1, 0)} if self.warming_up(expert) else set()
        return found | warm | {self.due(row) for row in self.predicted(expert)}

    def unsent(self, expert: t.ExpertId) -> list[t.Visit]:
        """Of the visits that have named it, those whose rows were not sent yet; hosts left out."""
        uses = [attempt.uses for attempt in self.slots.values() if attempt.load.expert == expert]
        here = [visit for visit in self.named(expert) if expert.expert not in self.gates[visit].hosted]
        return [visit for visit in here if not any(visit in each for each in uses)]

    def held_for(self, attempt: Attempt) -> tuple[int, int]:
        """When the first of those that it was loaded for needs it, or of all if those do not any more."""
        rows = [row for row in self.predicted(attempt.load.expert) if row in attempt.owners]
        return min(
            {self.due(row) for row in rows} or self.dues(attempt.load.expert), default=(-1, attempt.load.load_id)
        )

    def due(self, row: t.Visit) -> tuple[int, int]:
        ahead = self.requests[row.request].ahead(row.position)
        return (0, ahead) if row.request in self.step else (row.request, ahead)

    def wanted(self, expert: t.ExpertId) -> bool:
        """Some gate is to come that may choose it, or its request waits for it to be there."""
        return bool(self.predicted(expert) or self.planned(expert.layer) or self.warming_up(expert))

    def there(self, layer: int, kept: bool = False, whole: Collection[int] = ()) -> frozenset[int]:
        """Experts whose bytes were in slots when the last fact came. `kept`: of those, the ones that stay. `whole`:
        experts that count only in full precision."""
        loaded = [a for a in self.before if a.loaded and not a.failed and (a.keeps or not kept)]
        loads = [a.load for a in loaded if a.load.expert.layer == layer]
        return frozenset(load.expert.expert for load in loads if not load.form or load.expert.expert not in whole)

    def room(self, worker: int) -> int:
        """How many experts it can hold for requests just now."""
        return self.live[worker] - self.audits.computing(worker)

    def copies(self, expert: t.ExpertId) -> list[Attempt]:
        """Where it is, or will be, for more than the computations that were sent."""
        return [a for a in self.slots.values() if a.load.expert == expert and not (a.failed or a.last_call)]

    # --- facts --------------------------------------------------------------------------------------------------------

    def fact(self, event: t.Event, now: int) -> None:
        self.now, short = now, self.short
        self.united.clear()
        self.dropped.clear()
        self.before = list(self.slots.values())
        match event:
            case t.LoadEnded() | t.LoadFailed():
                if not self.audits.load_over(event):
                    self._load_over(event)
            case t.ComputeEnded() | t.ComputeFailed():
                if not self.audits.call_over(event):
                    self._call_over(event)
            case t.Predicted():
                if self.requests[event.request].open:
                    self.predict(t.Visit(event.request, event.position, event.layer), event.experts, event.experts)
            case t.GateFired():
                self._gate_fired(event)
            case t.StepStarted():
                self._step_started(event)
            case t.TokenDecoded():
                if self.requests[event.request].prefilling:
                    self.unwarmed.add(event.request)
                self.requests[event.request].decoded(event.index)
            case t.WorkerJoined():
                self.live[event.worker] = event.slots
                self.costs[event.worker] = {cost.form: cost.load_s + cost.restore_s for cost in event.forms}
                self.links[event.worker] = []
                self.held[event.worker] = None if event.held is None else experts_of(event.held)
                self.seen["joined late"] += now > 0
                self.seen["host joined"] += event.slots == 0
            case t.WorkerLost():
                self._lost(event.worker)
            case t.HoldingsChanged():
                self.held[event.worker] = None if event.held is None else experts_of(event.held)
                self.smooth = False
                self.seen["part changed"] += 1
            case t.ShadowJoined():
                self.shadow = True
            case t.ShadowLost():
                self.shadow = False
                self.seen["shadow lost"] += 1
            case t.RequestOpened():
                self.requests[event.request] = RequestBooks(event.prompt_tokens)
            case t.RequestClosed():
                if self.requests[event.request].open:
                    gates = [gate.united for v, gate in self.gates.items() if v.request == event.request]
                    self.seen["closed in a layer"] += any(gates)
                    self.seen["closed between gates"] += not all(gates)
                    self.close(event.request)
        waited = short and not self.short and any(one.open for one in self.requests.values())
        self.seen["waited for workers"] += waited
        self.seen["waited in a layer"] += waited and any(gate.united for gate in self.gates.values())
        self.unite(())

    def _step_started(self, event: t.StepStarted) -> None:
        open_ones = {number for number, one in self.requests.items() if one.open}
        self.step = {each.request: each for each in event.passes if each.request in open_ones}
        for each in self.step.values():
            one = self.requests[each.request]
            one.prefilling, one.first, one.stop = each.prefill, each.position, each.position + each.tokens
            one.fired = one.united = -1
        self.seen["step of several"] += len(self.step) > 1
        self.seen["prefill beside decoding"] += len({each.prefill for each in self.step.values()}) > 1
        self.seen["block"] += any(each.tokens > 1 and not each.prefill for each in self.step.values())
        self.seen["not in the step"] += len(open_ones) > len(self.step) > 0

    def unite(self, leaving: Collection[int]) -> None:
        """Once the gates of all passes in the step have fired, their layer counts. `leaving`: requests that fail."""
        members = [self.requests[n] for n in self.step if n not in leaving]
        held = {v: g for v, g in self.gates.items() if not g.united and v.request not in leaving}
        least = min((one.fired for one in members), default=-1)
        fresh = {v: g for v, g in held.items() if v.layer <= least}
        if not fresh:
            return
        hints = {e for gate in fresh.values() for e in gate.predicted}
        if self.plans_ahead and any(gate.prefill for gate in fresh.values()):
            hints |= set(range(self.plan.experts))
        for visit, gate in fresh.items():
            one, gate.hinted = self.requests[visit.request], frozenset(hints)
            gate.united, gate.at, gate.last_load, one.united = True, self.now, self.now, visit.layer
            gate.present = self.there(visit.layer, whole=gate.best if self.plan.forms else ())
            for row in gate.positions:
                self.predictions.pop(t.Visit(visit.request, row, visit.layer), None)
        self.united += fresh
        named = Counter(e for gate in fresh.values() for e in gate.rows)
        self.seen["needed by several"] += any(n > 1 for n in named.values())

    def pays(self, worker: int, form: str) -> bool:
        """Loading the form there and restoring it is faster than loading the full one, as far as that is known."""
        costs = self.costs[worker]
        return not form or not costs or costs[form] < costs[""]

    def _lost(self, worker: int) -> None:
        self.smooth = False
        self.audits.lost(worker)
        if self.live.pop(worker) == 0:
            for key in [key for key, attempt in self.hosting.items() if attempt.load.worker == worker]:
                self._suspect(self.hosting[key].load.expert)
                self.stop_hosting(key)
                self.seen["host lost at work"] += 1
        for attempt in self.links.pop(worker)[:1]:
            self._suspect(attempt.load.expert)
        held = [place for place in self.slots if place[0] == worker]
        for place in held:
            attempt = self.give_up(place)
            if attempt.uses and attempt.loaded:
                self._suspect(attempt.load.expert)
            self.seen["lost while computing" if attempt.uses and attempt.loaded else "lost while loading"] += 1
        self.seen["lost while idle"] += not held

    def _suspect(self, expert: Expert) -> None:
        self.suspects.add(expert)
        self.failures[expert] += 1

    def predict(self, row: t.Visit, experts: tuple[int, ...], bring: tuple[int, ...]) -> None:
        """`bring`: those that are to be in slots."""
        one, wanted = self.requests[row.request], frozenset(bring)
        if one.passed(row):
            one.late += 1
            self.seen["late prediction"] += 1
            last = one.readings.get(row, [None])[-1]
            if last is not None and last.predicted is None and not last.wrong:
                last.predicted = frozenset(experts)
            return
        self.seen["second prediction"] += row in self.predictions
        dropped = self.predictions.get(row, wanted) - wanted
        self.seen["replaced prediction"] += bool(dropped)
        self.dropped |= {t.ExpertId(row.layer, expert) for expert in dropped}
        for attempt in self.slots.values():
            if attempt.load.expert.layer == row.layer and attempt.load.expert.expert in dropped:
                rows = [other for other in self.predicted(attempt.load.expert) if other.request == row.request]
                attempt.disown(row, another=rows != [row])
        self.seen["brings others"] += wanted != set(experts)
        self.predictions[row] = wanted
        one.expected[row] = frozenset(experts)

    def _gate_fired(self, event: t.GateFired) -> None:
        visit, one = event.visit, self.requests[event.visit.request]
        if not one.open:
            return
        rows = [t.Visit(visit.request, position, visit.layer) for position in range(one.first, one.stop)]
        assert visit == rows[0]
        one.fired = visit.layer
        wanted = [self.predictions.get(row, frozenset()) for row in rows]
        self.gates[visit] = Gate(
            dict(event.rows),
            event.chosen,
            range(one.first, one.stop),
            one.prefilling,
            frozenset[int]().union(*wanted),
            best=frozenset(best_of(event)),
        )
        for row, chosen in zip(rows, event.chosen, strict=True):
            expected = one.expected.pop(row, None)
            if not one.prefilling and self.predicts:
                one.in_time += len(self.gates[visit].predicted.intersection(chosen))
                one.readings.setdefault(row, []).append(Reading(frozenset(chosen), expected))
                self.seen["row read again"] += len(one.readings[row]) > 1

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
        one, number, gate = self.requests[visit.request], attempt.load.expert.expert, self.gates[visit]
        gate.done.add(number)
        self.computed += 1
        if host:
            del self.hosting[visit, number]
            one.hosted += 1
            one.decode_hosted += not one.prefilling
            self.seen["computed by a host"] += 1
            return
        own = {owner for owner in attempt.owners if gate.covers(visit, owner)}
        one.hits.add(sure=not own, possible=own != attempt.owners)
        self.hits.add(sure=not own or bool(attempt.served), possible=own != attempt.owners)
        self.again += attempt.done
        self.seen["computed where it was"] += attempt.done
        attempt.done = True
        if own:
            attempt.served.add(visit)
            attempt.owners = attempt.owners - own | {NOBODY}
        if attempt.leaving and not attempt.uses:
            del self.slots[attempt.load.worker, attempt.load.slot]

    # --- what ends ----------------------------------------------------------------------------------------------------

    def close(self, request: int) -> None:
        one = self.requests[request]
        one.open = False
        self.step.pop(request, None)
        for visit in [v for v in self.gates if v.request == request]:
            one.broken |= self.gates[visit].united
            del self.gates[visit]
            for attempt in self.slots.values():
                for call in attempt.uses.pop(visit, Use()).owed:
                    self.calls.pop(call, None)
                    attempt.leaving &= call != attempt.last_call
            for key in [key for key in self.hosting if key[0] == visit]:
                self.stop_hosting(key)
        self.predictions = {v: e for v, e in self.predictions.items() if v.request != request}
        self.unwarmed.discard(request)
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


def best_of(event: t.GateFired) -> list[int]:
    """The expert of the highest score of each row's choice; the lower number of equals."""
    pairs = zip(event.chosen, event.scores, strict=False)
    return [min(chosen, key=lambda e: (-scores[e], e)) for chosen, scores in pairs]

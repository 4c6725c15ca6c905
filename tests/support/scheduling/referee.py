"""The referee of the random worlds: sees facts and commands, and what a strategy's objects are asked and answer, keeps
books of its own, and holds the core to what must always be true.

It checks every command when it is given: loads go only into free slots of live workers, and at most `PREFETCHES` of
those that are only predicted are on a link; every row of every named expert is computed exactly once, in order, in
parts of at most a mini-batch, in one place, by whoever holds the expert; nothing is evicted that a gate has named,
nothing kept but on a policy's word; a layer is resumed when all its experts were computed, and never before; a request
fails for a reason, and an id is never used twice. `referee_checks.py` says what must hold after each fact and what
the core's own figures must be at the end.

Where the books cannot tell what the core must know, they do not guess: they check less.

Condition                               What is then not checked
--------------------------------------  ------------------------------------------------------------------------------
`owners` false: a load was begun that   Which request reloaded, unless nobody stays; with forms or a placement, who was
several visits, or a warm-up, awaited   present at a gate; in what order in-turn prefill sends rows.
`clear` false: forms, `owners` false,   How many loads were pre-empted, and how many were unused, of all requests
or a prediction that was changed        together; each request's hits.
`smooth` false: a worker was lost, a    Each request's hits (all together stay between what was computed again and
load or a computation has failed        what was computed at all); in-turn prefill's stall, where a policy evicts.
Several requests                        Whether a load of in-turn or pipelined prefill begins before its gate; loads
                                        in decoding; in what order in-turn prefill sends rows.
A policy that keeps experts             Whether what is only predicted waits for no reason.
A policy that may have nobody leave     Whether a named expert waits for no reason, where one full worker computes
(all but none, all and lru)             something and another could make room.
Prefill in turn                         Whether a named expert waits for no reason; whom prefill's `Route` calls
                                        present.
Forms                                   Whether what was loaded leaves though everything stays: it may not serve.
An expert failed `MAX_FAILURES` times   Whether its prediction waits; why any request fails from then on.
A request that ended in a layer         Its stalls.

Never checked, whatever the plan: on which worker and in which slot an expert is loaded (groups, homes, prefill's
shares); which of several waiting loads begins first, and which prediction is put off, but for the link's rule; that a
policy's victim is a wise one; which form is loaded; what `Follow`, `Align` and `Unfollow` say, but that there is a
shadow; costs and paces told to strategies; `in_time`, `decode_reused` and, by request, bytes and loads. The exact
command lists of tests/scheduler/core are for those.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from scheduler import types as t
from scheduler.core.machine import MAX_FAILURES, Core
from scheduler.core.slots import PREFETCHES
from scheduler.policies.predictors.base import Forecast
from scheduler.policies.routers import Chosen
from support.scheduling.plan import Plan
from support.scheduling.referee_books import Attempt, Books, Use
from support.scheduling.referee_checks import check_end, check_settled


class Referee:
    """Judges every command when it is given, with an AssertionError."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.books = Books(plan)
        self._ids: set[int] = set()
        self._keeps: deque[tuple[int, t.ExpertId, bool]] = deque()
        self._victims: list[tuple[int, t.ExpertId]] = []
        self._made_room: set[tuple[int, t.ExpertId]] = set()
        self._routed: Chosen | None = None

    @property
    def seen(self) -> Counter[str]:
        """Which of the interesting things have happened, and how often."""
        return self.books.seen

    # --- what the strategy's objects are asked, and answer, as it happens ---------------------------------------------

    def heard_forecasts(self, forecasts: Iterable[Forecast]) -> None:
        for visit, experts, bring in forecasts:
            self.books.predict(visit, experts, experts if bring is None else bring)

    def heard_keeps(self, worker: int, expert: t.ExpertId, predicted: bool, stays: bool) -> None:
        books = self.books
        if predicted:
            asked = any(expert in experts for experts in books.asked_warm.values())
            known = asked or books.predicted(expert) or books.planned(expert.layer)
            assert known, f"{expert} is loaded as if predicted"
        else:
            assert books.named(expert), f"{expert} is loaded as if a gate had named it"
        self._keeps.append((worker, expert, stays))
        if stays:
            self._count_kept(expert, 1)

    def heard_left(self, expert: t.ExpertId) -> None:
        self._count_kept(expert, -1)

    def _count_kept(self, expert: t.ExpertId, more: int) -> None:
        kept = self.books.kept
        count = kept.pop(expert, 0) + more
        if count:
            kept[expert] = count

    def heard_victim(self, worker: int, evictable: Collection[t.ExpertId], victim: t.ExpertId | None) -> None:
        assert evictable
        if victim is not None:
            self._victims.append((worker, victim))

    def heard_route(self, chosen: Chosen, resident: Collection[int], routed: Chosen) -> None:
        books, visit = self.books, self.books.gate
        assert visit is not None, "the router is asked at gates only"
        assert not books.requests[visit.request].prefilling, "the router is asked in decoding only"
        here = {e for (layer, e), a in books.before.items() if layer == visit.layer and a.loaded}
        loaded = [a.load.expert for a in books.slots.values() if a.loaded]
        everywhere = {expert for layer, expert in loaded if layer == visit.layer}
        assert here <= set(resident) <= everywhere, f"{here} are resident, the router is told {resident}"
        assert chosen == books.gates[visit].chosen
        self._routed = routed
        if routed != chosen:
            books.seen["routed"] += 1
            books.gates[visit].rows = dict(Counter(e for row in routed for e in row))

    def heard_placement(self, missing: Mapping[int, int], resident: Mapping[int, int], hosted: Collection[int]) -> None:
        visit = self.books.gate
        assert visit is not None
        gate = self.books.gates[visit]
        assert sorted([*missing, *resident]) == sorted(gate.rows)
        kept = {e for layer, e in self.books.before if layer == visit.layer}
        assert kept & set(gate.rows) <= set(resident), f"{kept} are there, {missing} are called missing"
        gate.hosted = set(hosted)

    def heard_warm_up(self, experts: Sequence[t.ExpertId]) -> None:
        books = self.books
        books.warm_ups[books.decoding] = [expert for expert in experts if expert not in books.before]
        books.asked_warm[books.decoding] = set(experts)
        books.seen["warm"] += bool(experts)

    # --- facts and commands -------------------------------------------------------------------------------------------

    def fact(self, event: t.Event, now: int) -> None:
        """This has happened, and the core is about to be told."""
        self._victims.clear()
        self._made_room.clear()
        self._routed = None
        self.books.fact(event, now)

    def answered(self, commands: list[t.Command], core: Core) -> None:
        """These were given in answer to the last fact."""
        books, fresh = self.books, set[int]()
        visit, failing = books.gate, {c.request for c in commands if isinstance(c, t.Fail)}
        present = self._present(visit, commands) if visit is not None else set()
        if visit is not None:
            rows = books.gates[visit].rows
            mine = [a.load.expert.expert for a in books.slots.values() if a.owner == visit]
            books.requests[visit.request].unused += sum(expert not in rows for expert in mine)
            if visit.request not in failing:
                self._judge_gate(visit, commands, present)
        for c in commands:
            self._command(c, fresh, failing)
        assert set(self._victims) == self._made_room, f"{self._victims} were to make room, {self._made_room} did"
        assert not self._keeps, f"it was asked whether {self._keeps} stay, and nothing was loaded"
        check_settled(books, core)

    def finish(self, core: Core) -> None:
        """Everything is over."""
        check_end(self.books, core)

    def _present(self, visit: t.Visit, commands: list[t.Command]) -> set[int]:
        """Experts of the gate that has just fired whose bytes are where they can be computed."""
        books = self.books
        there = {e for (layer, e), a in books.before.items() if layer == visit.layer and a.loaded}
        fresh: set[tuple[int, int]] = set()
        for c in commands:
            if isinstance(c, t.Load):
                fresh.add((c.worker, c.slot))
            if not isinstance(c, t.Compute | t.Evict) or (c.worker, c.slot) in fresh:
                continue
            attempt = books.slots.get((c.worker, c.slot))
            if attempt is None or not attempt.loaded or attempt.load.expert != c.expert:
                continue
            if isinstance(c, t.Compute) and c.visit == visit:
                there.add(c.expert.expert)
            elif isinstance(c, t.Evict) and c.expert.layer == visit.layer:
                hosted = c.expert.expert in books.gates[visit].hosted and not attempt.keeps
                if (hosted or self.plan.forms) and attempt.owner == visit:
                    there.add(c.expert.expert)
        return there

    def _judge_gate(self, visit: t.Visit, commands: list[t.Command], present: set[int]) -> None:
        """A `Route` where one is due, and figures."""
        books = self.books
        gate, one = books.gates[visit], books.requests[visit.request]
        routes = [c for c in commands if isinstance(c, t.Route)]
        changed = self._routed is not None and self._routed != gate.chosen
        tells = self.plan.predictor == "attention"
        assert len(routes) == (changed or tells), f"{routes}, though the router said {self._routed}"
        for route in routes:
            assert route.visit == visit
            assert route.experts == (self._routed if changed else ())
            sent = not one.prefilling or self.plan.prefill != "in-turn"
            if sent and (books.owners or not (self.plan.forms or self.plan.placement)):
                assert set(route.resident) == present & set(gate.rows)
            first = next((i for i, c in enumerate(commands) if isinstance(c, t.Compute)), len(commands))
            assert commands.index(route) < first
        if not one.prefilling:
            one.named += len(gate.rows)
            one.present += len(present & set(gate.rows))

    def _command(self, c: t.Command, fresh: set[int], failing: set[int]) -> None:
        """`fresh`: loads commanded in answer to the same fact. `failing`: requests that a Fail will follow for."""
        match c:
            case t.Compute():
                self._compute(c, fresh)
            case t.Load():
                self._load(c)
                fresh.add(c.load_id)
            case t.Evict():
                self._evict(c, failing)
            case t.Resume():
                self._resume(c)
            case t.Route():
                for row in c.experts:
                    assert row, f"{c}: nobody computes a row"
                    assert len(set(row)) == len(row), f"{c}: an expert twice in a row"
            case t.Fail():
                self._fail(c)
            case t.Follow() | t.Align() | t.Unfollow():
                assert self.books.shadow, f"{c}, though there is no shadow"

    def _resume(self, c: t.Resume) -> None:
        gate, one = self.books.gates.pop(c.visit), self.books.requests[c.visit.request]
        assert gate.done == set(gate.rows), f"{c} before {set(gate.rows) - gate.done} were computed"
        if one.prefilling:
            one.prefill_stall += gate.last_load - gate.at
        else:
            one.stall += gate.last_load - gate.at

    def _fail(self, c: t.Fail) -> None:
        books = self.books
        assert books.requests[c.request].open
        often = max(books.failures.values(), default=0) >= MAX_FAILURES
        slots = sum(books.live.values())
        lacks = self.plan.stay and slots < self.plan.all_experts
        assert not slots or often or lacks, f"{c} for no reason"
        why = "no worker" if not slots else "too few slots" if lacks else "too often"
        books.seen[f"failed: {why}"] += 1
        books.close(c.request)

    # --- loads --------------------------------------------------------------------------------------------------------

    def _load(self, c: t.Load) -> None:
        books, plan = self.books, self.plan
        assert 0 <= c.slot < books.live[c.worker], f"{c}: no such worker or slot"
        assert (c.worker, c.slot) not in books.slots, f"{c} into a taken slot"
        assert not c.form or plan.forms
        assert books.pays(c.worker, c.form), f"{c} where {c.form} does not pay"
        self._new_id(c.load_id)
        books.seen[f"form {c.form or 'full'}"] += 1
        worker, expert, stays = self._keeps.popleft()
        assert (worker, expert) == (c.worker, c.expert), "who is loaded is not who was asked about"
        there = [a for a in books.slots.values() if a.load.expert == c.expert and a.keeps and not a.failed]
        assert not there, f"{c}: it is kept in {there[0].load} already"
        named, warming_up = books.named(c.expert), books.warming_up(c.expert)
        if plan.requests == 1 and books.requests[1].prefilling and not books.plans_ahead:
            known = any(v.layer == c.expert.layer and c.expert.expert in g.rows for v, g in books.gates.items())
            assert known or warming_up or books.predicted(c.expert), f"{c} before its gate"
            books.seen["loaded in turn"] += 1
        link = books.links[c.worker]
        if not named:
            assert len(link) < PREFETCHES, f"{c}: {len(link)} loads are on its link, and no gate waits for it"
        attempt = Attempt(c, stays, owner=self._owner(c.expert, named, warming_up))
        books.slots[c.worker, c.slot] = books.loads[c.load_id] = attempt
        link.append(attempt)
        books.loaded += 1
        books.decode_loaded += plan.requests == 1 and not books.requests[1].prefilling

    def _owner(self, expert: t.ExpertId, named: list[t.Visit], warming_up: int) -> t.Visit | None:
        """For whom a load begins. Who is named comes first; where there are several, it cannot be told."""
        books = self.books
        served = {v for a in books.slots.values() if a.load.expert == expert for v in a.uses}
        wanted = [v for v in named if v not in served] + books.predicted(expert)
        planned = [t.Visit(number, 0, expert.layer) for number in books.planned(expert.layer)]
        if len(wanted or planned) > 1 or (planned and wanted) or warming_up:
            books.clear = books.owners = False
        return next(iter(wanted or planned), None)

    def _evict(self, c: t.Evict, failing: set[int]) -> None:
        books = self.books
        assert c.worker in books.live, f"{c} to a worker that is gone"
        attempt = books.give_up((c.worker, c.slot))
        assert attempt.load.expert == c.expert
        for visit in attempt.uses:
            over = visit.request in failing or not books.requests[visit.request].open
            assert attempt.failed or over, f"{c}: the gate named it"
        if attempt.failed:
            return
        # Beside the victim, another copy of its expert may go that may not stay.
        owner, victim = attempt.owner, attempt.keeps and (c.worker, c.expert) in self._victims
        planned = any(number not in failing for number in books.planned(c.expert.layer))
        over = owner is not None and (
            owner.request in failing
            or not books.requests[owner.request].open
            or (owner == books.gate and not attempt.keeps)
        )
        still = attempt.keeps and not attempt.loaded
        put_off = bool(books.predicted(c.expert)) or planned or books.warming_up(c.expert) > 0 or still
        if victim:
            self._made_room.add((c.worker, c.expert))
            books.seen["victim"] += 1
        elif put_off and (attempt.keeps or not over):
            books.preempted += 1
            books.seen["put off"] += 1
        elif attempt.keeps:
            books.seen["first of the idle"] += 1
        stays = attempt.keeps and attempt.loaded and self.plan.stay and not self.plan.forms
        assert victim or not stays, f"{c}, though everything stays"

    def _new_id(self, number: int) -> None:
        assert number not in self._ids, f"id {number} was used before"
        self._ids.add(number)

    # --- computations -------------------------------------------------------------------------------------------------

    def _compute(self, c: t.Compute, fresh: set[int]) -> None:
        books = self.books
        assert c.worker in books.live, f"{c} to a worker that is gone"
        gate, one = books.gates[c.visit], books.requests[c.visit.request]
        layer, expert = c.expert
        assert layer == c.visit.layer
        assert expert not in gate.done, f"{c}: computed twice"
        host = books.live[c.worker] == 0
        in_turn = one.prefilling and self.plan.prefill == "in-turn" and not host
        attempt = self._hosted_at(c) if host else self._held_at(c)
        others = [
            a for a in books.slots.values() if a is not attempt and c.visit in a.uses and a.load.expert == c.expert
        ]
        assert not others, f"{c}: also under way in {others}"
        assert host or (c.visit, expert) not in books.hosting, f"{c}: also under way at a host place"
        first, fresh_one = c.visit not in attempt.uses, not attempt.used and attempt.load.load_id in fresh
        use = attempt.uses.setdefault(c.visit, Use())
        attempt.used = True
        books.seen["shared"] += first and len(attempt.uses) > 1
        if first and attempt.loaded and not host:
            gate.last_load = max(gate.last_load, attempt.at if in_turn else books.now)
        if in_turn:
            self._in_turn(c, attempt)
        assert c.start == use.sent < c.stop <= gate.rows[expert]
        assert c.stop - c.start <= self.plan.mini_batch
        leaves = c.stop == gate.rows[expert] and not attempt.keeps and not host
        assert c.evict == leaves, f"{c}: only the last rows evict, and only where nobody stays"
        self._new_id(c.call_id)
        if fresh_one and not one.prefilling:
            missed = expert not in gate.predicted and expert not in gate.hosted
            one.reloads += missed
            books.seen["reload" if missed else "predicted, loaded late"] += 1
        books.seen["several chunks"] += c.start > 0
        use.sent = c.stop
        use.owed.add(c.call_id)
        books.calls[c.call_id] = attempt, c.visit

    def _hosted_at(self, c: t.Compute) -> Attempt:
        assert c.expert.expert in self.books.gates[c.visit].hosted, f"{c}: nobody said that the host computes it"
        assert (c.slot, c.evict) == (0, False)
        lying = Attempt(t.Load(c.worker, 0, c.expert, 0), loaded=True, used=True)
        attempt = self.books.hosting.setdefault((c.visit, c.expert.expert), lying)
        assert attempt.load.worker == c.worker, f"{c}: also under way at another host place"
        return attempt

    def _held_at(self, c: t.Compute) -> Attempt:
        attempt = self.books.slots[c.worker, c.slot]
        assert attempt.load.expert == c.expert, f"{c}: the slot holds {attempt.load.expert}"
        assert attempt.keeps or attempt.uses.keys() <= {c.visit}
        return attempt

    def _in_turn(self, c: t.Compute, attempt: Attempt) -> None:
        assert attempt.loaded, f"{c} before its load has ended"
        if self.plan.requests > 1 or not self.books.owners:
            return
        gate = self.books.gates[c.visit]
        awaited = gate.rows.keys() - gate.done - gate.hosted
        under_way = [
            a.load
            for a in self.books.slots.values()
            if a.load.expert.layer == c.visit.layer
            and not a.loaded
            and a.load.expert.expert in awaited
            and (a.owner == c.visit or a.keeps)
        ]
        assert not under_way, f"{c} before {under_way} have ended"

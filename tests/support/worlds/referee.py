"""The referee of the random worlds: sees facts and commands, and what a strategy's objects are asked and answer, keeps
books of its own, and holds the core to what must always be true.

It checks every command when it is given: nothing follows from a gate before those of all passes in the step have fired;
loads go only into free slots of live workers, never of an expert that is in a slot already, and at most `PREFETCHES` of
those that are only predicted are on a link; every row of every named expert is computed exactly once, in order, in
parts of at most a mini-batch, in one place, by whoever holds the expert; of what workers that were lost may have
loaded or computed, only one is tried again at a time; nothing is evicted that a gate has named, and
nothing put off but for what is more urgent; nothing is kept but on a policy's word, and nothing that may not stay is
loaded to warm up; a layer is resumed when all its experts were computed, never before and in bounded time; while
workers are missing, what is needed waits; a request fails only when that has lasted too long, with the reason given for
that, or when an expert has failed too often; and an id is never used twice. `checks.py` says what must hold after each
fact and what the core's own figures must be at the end, `urgency.py` which prefetches come first, `audits.py` what
holds for audits.

Where the books cannot tell what the core must know, they do not guess: they check less.

Condition                               What is then not checked
--------------------------------------  ------------------------------------------------------------------------------
Several visits, or a warm-up, awaited   Which request's load and which one's hit it is, and whether it is a reload: the
the expert when its load began          figures must lie between the least and the most, those of all together too.
`smooth` false: a worker was lost, a    Each request's hits (all together stay between what was computed again and
load or a computation has failed        what was computed at all); in-turn prefill's stall, where a policy evicts.
Several requests                        Whether a load of in-turn or pipelined prefill begins before its gate; loads
                                        in decoding; in what order in-turn prefill sends rows.
A policy that keeps experts             Whether what is only predicted waits for no reason, and in what order.
A policy that may have nobody leave     Whether a named expert waits for no reason, where one full worker computes
(all but none, all and lru)             something and another could make room.
Prefill in turn                         Whether a named expert waits for no reason; whom prefill's `Route` calls
                                        present.
Forms                                   Whether what was loaded leaves though everything stays: it may not serve. How
                                        many loads were pre-empted, how many were unused; hits.
An expert failed `MAX_FAILURES` times   Whether its prediction waits; which request fails for that from then on.
Workers are missing                     Whether what could be loaded is, where some are left.
A store in parts                        Whether all stay though everything is to: holders may have too few slots.
A request that ended in a layer         Its stalls.
Faults other than the shadow's          How long a layer may take.

Never checked, whatever the plan: on which worker and in which slot an expert is loaded (groups, homes, prefill's
shares); which of several demand loads begins first; that a policy's victim is a wise one; which form is loaded; what
`Follow`, `Align` and `Unfollow` say, but that there is a shadow; costs and paces told to strategies; `decode_reused`
and, by request, bytes. The exact command lists of tests/scheduler/core are for those.
"""

from __future__ import annotations

from scheduler import types as t
from scheduler.core.machine import MAX_FAILURES, Core
from scheduler.core.slots import PREFETCHES
from support.worlds.checks import check_end, check_settled
from support.worlds.listener import Listener
from support.worlds.plan import Plan
from support.worlds.records import NOBODY, Attempt, Gate, Use
from support.worlds.urgency import check_order, check_put_off


class Referee(Listener):
    """Judges every command when it is given, with an AssertionError."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        super().__init__(plan)
        self._event: t.Event | None = None
        self._ids: set[int] = set()
        self._made_room: set[tuple[int, t.ExpertId]] = set()
        self._sent: list[Attempt] = []
        self._sealed: list[Attempt] = []
        self._put_off: list[t.Evict] = []
        self._failing: set[int] = set()
        self._left_waiting: set[t.ExpertId] = set()
        self._waiting: set[t.ExpertId] = set()
        """Experts that a demand waits for without a worker. Those of a suspect also if it waited until this fact: it
        used no copy until then."""

    # --- facts and commands -------------------------------------------------------------------------------------------

    def fact(self, event: t.Event, now: int) -> None:
        """This has happened, and the core is about to be told."""
        self._event = event
        for each in (self.victims, self._made_room, self.asked, self._sent, self._sealed, self._put_off):
            each.clear()
        self.books.fact(event, now)

    def answered(self, commands: list[t.Command], core: Core) -> None:
        """These were given in answer to the last fact."""
        books, fresh = self.books, set[int]()
        without_worker = set(core.waiting)
        self._waiting = without_worker | (self._left_waiting & books.suspects)
        self._left_waiting = without_worker
        self._failing = failing = {c.request for c in commands if isinstance(c, t.Fail)}
        unheld = {visit.request for visit in books.unheld()}
        books.unite(failing)
        assert books.short or not books.unwarmed, f"nobody has asked what is to be there for {books.unwarmed}"
        if isinstance(self._event, t.WorkerWaitExpired):
            late = {number for number, one in books.requests.items() if one.open} if books.short else unheld
            waits = failing <= late and any(books.is_unheld(expert) for expert in without_worker)  # suspects
            assert failing == late or waits, f"{failing} fail, and {late} have waited too long"
            books.seen["waited for nothing"] += not late
        if isinstance(self._event, t.WorkerJoined | t.WorkerLost) and not books.short:
            others = without_worker - books.suspects
            assert not others, f"workers are there, and {others} wait for them"
        assert all(gate.united for gate in self.asked), "the gates of the step have not all fired"
        if isinstance(self._event, t.GateFired) and not books.united:
            assert not commands, f"{commands}, before all gates of the step have fired"
            books.seen["gate held"] += 1
        books.seen["united by a departure"] += bool(books.united) and not isinstance(self._event, t.GateFired)
        for visit in books.united:
            self._judge_gate(visit, commands)
        self._set_deadline()
        if isinstance(self._event, t.AuditRequested):
            for number in books.audits.judge_begin(self._event, commands, core):
                self._new_id(number)
        else:
            for c in commands:
                self._command(c, commands, fresh)
        assert set(self.victims) == self._made_room, f"{self.victims} were to make room, {self._made_room} did"
        self._pass_refused_warm_ups()
        assert not self.keeps, f"it was asked whether {self.keeps} stay, and nothing was loaded"
        check_put_off(books, self._put_off, commands)
        departure = failing or isinstance(self._event, t.RequestClosed)
        for attempt in () if departure else self._sent:
            self._check_last_call(attempt)
        for attempt in self._sealed:
            waiting = [v for v in books.unsent(attempt.load.expert) if v.request not in failing]
            # Prefill in turn waits for the other copy; a suspect is tried by itself.
            copied = books.copies(attempt.load.expert) or self.plan.forms
            assert not waiting or copied or attempt.load.expert in self._waiting, (
                f"{attempt.load} leaves, and {waiting} need it"
            )
        check_settled(books, core)
        check_order(books, commands, core)
        if self.plan.auditing:
            books.audits.check(core)

    def finish(self, core: Core) -> None:
        """Everything is over."""
        check_end(self.books, core)

    def _judge_gate(self, visit: t.Visit, commands: list[t.Command]) -> None:
        """A `Route` where one is due, and figures."""
        books = self.books
        gate, one = books.gates[visit], books.requests[visit.request]
        routes = [c for c in commands if isinstance(c, t.Route) and c.visit == visit]
        changed = gate.routed is not None and gate.routed != gate.chosen
        tells = self.plan.predictor == "attention"
        assert len(routes) == (changed or tells), f"{routes}, though the router said {gate.routed}"
        for route in routes:
            assert route.experts == (gate.routed if changed else ())
            assert set(route.resident) == gate.present & set(gate.rows)
            first = next(
                (i for i, c in enumerate(commands) if isinstance(c, t.Compute) and c.visit == visit), len(commands)
            )
            assert commands.index(route) < first
        if not one.prefilling:
            one.named += sum(gate.rows.values())
            one.present += sum(rows for e, rows in gate.rows.items() if e in gate.present)
        self._count_unused(visit, gate)

    def _count_unused(self, visit: t.Visit, gate: Gate) -> None:
        """Loads begun for its rows that it did not choose; another pass of the step may have."""
        books = self.books
        others = {e for v in books.united for e in books.gates[v].rows if v.layer == visit.layer}
        for attempt in books.slots.values():
            expert = attempt.load.expert
            own = {owner for owner in attempt.owners if owner.layer == expert.layer and gate.covers(visit, owner)}
            known = expert.expert in gate.predicted or (gate.prefill and books.plans_ahead)
            if own and known and expert.layer == visit.layer and expert.expert not in gate.rows:
                sure = own == attempt.owners and expert.expert not in others and not attempt.done
                books.requests[visit.request].unused.add(sure)
                books.unused.add(sure)
                attempt.owners = attempt.owners - own | {NOBODY}  # once, even if a row of it is read again

    def _set_deadline(self) -> None:
        """By when the layers that were united now must be resumed, if their experts came one by one from one worker."""
        books, plan = self.books, self.plan
        gates = [books.gates[visit] for visit in books.united]
        experts = {(visit.layer, e) for visit in books.united for e in books.gates[visit].rows}
        calls = sum(-(-rows // plan.mini_batch) for gate in gates for rows in gate.rows.values())
        loads = len(experts) + (sum(len(gate.rows) for gate in gates) if plan.placement else 0)
        for gate in gates:
            gate.deadline = books.now + loads * (plan.load + 2 * plan.latency) + calls * plan.compute + plan.latency
            if plan.auditing:  # one of each worker may be computed
                gate.deadline += plan.compute + plan.latency

    def _command(self, c: t.Command, commands: list[t.Command], fresh: set[int]) -> None:
        """`commands`: all in answer to the fact. `fresh`: loads among them so far."""
        books = self.books
        match c:
            case t.Compute():
                self._compute(c, fresh)
            case t.Load():
                self._load(c)
                fresh.add(c.load_id)
            case t.Evict():
                if not books.audits.judge_evict(c, commands):
                    self._evict(c)
            case t.AuditDropped():
                books.audits.judge_drop(c, commands)
            case t.Resume():
                self._resume(c)
            case t.Route():
                assert c.visit in self.books.united, f"{c} at another time than its gate's"
                for row in c.experts:
                    assert row, f"{c}: nobody computes a row"
                    assert len(set(row)) == len(row), f"{c}: an expert twice in a row"
            case t.Fail():
                self._fail(c)
            case t.Follow() | t.Align() | t.Unfollow():
                assert self.books.shadow, f"{c}, though there is no shadow"

    def _resume(self, c: t.Resume) -> None:
        books = self.books
        gate, one = books.gates.pop(c.visit), books.requests[c.visit.request]
        assert gate.united, f"{c} before all gates of the step have fired"
        assert gate.done == set(gate.rows), f"{c} before {set(gate.rows) - gate.done} were computed"
        assert books.now <= gate.deadline or not self.plan.quiet, f"{c} at {books.now}, not before {gate.deadline}"
        if one.prefilling:
            one.prefill_stall += gate.last_load - gate.at
        else:
            one.stall += gate.last_load - gate.at

    def _fail(self, c: t.Fail) -> None:
        books = self.books
        assert books.requests[c.request].open
        if isinstance(self._event, t.WorkerWaitExpired):
            assert c.reason.endswith(self._event.reason)
            why = "too few slots" if sum(books.live.values()) else "no worker"
            why = why if books.short else "nobody holds it"
        else:
            assert max(books.failures.values(), default=0) >= MAX_FAILURES, f"{c} for no reason"
            why = "too often"
        books.seen[f"failed: {why}"] += 1
        books.close(c.request)

    # --- loads --------------------------------------------------------------------------------------------------------

    def _load(self, c: t.Load) -> None:
        books, plan = self.books, self.plan
        assert 0 <= c.slot < books.live[c.worker], f"{c}: no such worker or slot"
        assert (c.worker, c.slot) not in books.slots, f"{c} into a taken slot"
        assert (c.worker, c.slot) not in books.audits.own_slots(), f"{c} into an audit's slot"
        assert books.holds(c.worker, c.expert), f"{c}, which the worker does not hold"
        assert not c.form or plan.forms
        assert books.pays(c.worker, c.form), f"{c} where {c.form} does not pay"
        self._new_id(c.load_id)
        books.seen[f"form {c.form or 'full'}"] += 1
        self._pass_refused_warm_ups((c.worker, c.expert))
        kept = self.keeps.popleft()
        assert (kept.worker, kept.expert) == (c.worker, c.expert), "who is loaded is not who was asked about"
        named, there = books.named(c.expert), books.copies(c.expert)
        there += [a for a in self._sealed if a.load.expert == c.expert and not kept.predicted]
        allowed = len(books.dues(c.expert)) if kept.predicted and not any(a.keeps for a in there) else 1
        held = {books.held_for(attempt) for attempt in there}  # what was for two steps may be for one now
        assert len(held) < max(allowed, 1) or plan.forms, f"{c}: it is in {there[0].load} already"
        asked = kept.stays and any(c.expert in experts for experts in books.asked_warm.values())
        known = asked or books.predicted(c.expert) or books.planned(c.expert.layer)
        assert known if kept.predicted else named, f"{c} is loaded as if {'predicted' if kept.predicted else 'named'}"
        if plan.requests == 1 and books.requests[1].prefilling and not books.plans_ahead:
            assert named or books.warming_up(c.expert) or books.predicted(c.expert), f"{c} before its gate"
            books.seen["loaded in turn"] += 1
        link = books.links[c.worker]
        if not named:
            assert len(link) < PREFETCHES, f"{c}: {len(link)} loads are on its link, and no gate waits for it"
        attempt = Attempt(c, kept.stays, owners=self._owners(c.expert, [] if kept.predicted else named, kept.stays))
        self._count_load(attempt, [] if kept.predicted else named)
        assert attempt.owners, f"{c} for nobody"
        books.slots[c.worker, c.slot] = books.loads[c.load_id] = attempt
        link.append(attempt)
        books.loaded += 1
        books.decode_loaded += plan.requests == 1 and not books.requests[1].prefilling

    def _pass_refused_warm_ups(self, loaded: tuple[int, t.ExpertId] | None = None) -> None:
        """A warm-up whose expert may not stay is over without a load. `loaded`: on which worker a load begins, and of
        which expert."""
        books = self.books
        while self.keeps and self.keeps[0][:2] != loaded:
            kept = self.keeps.popleft()
            asked = [number for number, experts in books.asked_warm.items() if kept.expert in experts]
            assert asked, f"{kept}, and nothing was loaded"
            assert (kept.predicted, kept.stays) == (True, False), f"{kept}, and nothing was loaded"
            waiting = [number for number in asked if kept.expert in books.warm_ups[number]]
            if waiting:
                books.warm_ups[waiting[0]].remove(kept.expert)
            books.seen["refused warm-up"] += 1

    def _owners(self, expert: t.ExpertId, named: list[t.Visit], stays: bool) -> frozenset[t.Visit]:
        """The visits that a load may be begun for: those whose gates have named it, else those that may. A warm-up
        only where it `stays`."""
        books = self.books
        waiting = [v for v in named if v.request not in self._failing]
        if waiting:
            return frozenset(waiting)
        planned = [
            t.Visit(number, books.requests[number].first, expert.layer) for number in books.planned(expert.layer)
        ]
        warmed = [t.Visit(number, -1, -1) for number, asked in books.asked_warm.items() if stays and expert in asked]
        return frozenset((*books.predicted(expert), *planned, *warmed))

    def _count_load(self, attempt: Attempt, named: list[t.Visit]) -> None:
        """For whom it is begun, and whether no prediction had named it."""
        books, expert = self.books, attempt.load.expert.expert
        requests = {visit.request for visit in attempt.owners}
        for request in requests:
            books.requests[request].loads.add(len(requests) == 1)
        if not named:
            return
        missed = set[t.Visit]()
        for visit in attempt.owners:
            gate = books.gates[visit]
            missed |= {visit} if not gate.prefill and expert not in gate.predicted | gate.hosted else set()
        hinted = any(expert in books.gates[visit].hinted for visit in missed)  # what was wrong for one serves another
        for visit in missed:
            books.requests[visit.request].reloads.add(len(attempt.owners) == 1 and not hinted)
        books.reloads.add(missed == attempt.owners and not hinted, bool(missed))
        books.seen["reload" if missed else "predicted, loaded late"] += 1

    def _evict(self, c: t.Evict) -> None:
        books = self.books
        assert c.worker in books.live, f"{c} to a worker that is gone"
        attempt = books.give_up((c.worker, c.slot))
        assert attempt.load.expert == c.expert
        for visit in attempt.uses:
            assert attempt.failed or visit.request in self._failing, f"{c}: the gate of {visit} named it"
        if attempt.failed:
            return
        waiting = [v for v in books.unsent(c.expert) if v.request not in self._failing]
        others = books.copies(c.expert) or self.plan.forms or c.expert in self._waiting
        assert not waiting or others, f"{c}: the gates of {waiting} named it"
        # Beside the victim, another copy of its expert may go that may not stay.
        victim = attempt.keeps and (c.worker, c.expert) in self.victims
        rows = [v for v in books.predicted(c.expert) if v.request not in self._failing]
        planned = any(number not in self._failing for number in books.planned(c.expert.layer))
        still = attempt.keeps and not attempt.loaded
        wanted = bool(rows) or planned or books.warming_up(c.expert) > 0
        if victim:
            self._made_room.add((c.worker, c.expert))
            books.seen["victim"] += 1
        elif (wanted or still) and not attempt.last_call:
            expected = all(self._expects(owner, c.expert) for owner in attempt.owners)
            sure = still or (expected and not books.copies(c.expert))
            books.preempted.add(sure)
            books.seen["put off"] += 1
            self._put_off += [c] if wanted and sure else []
        elif attempt.keeps:
            books.seen["first of the idle"] += 1
        stays = attempt.keeps and attempt.loaded and self.plan.stay and not (self.plan.forms or self.plan.replicas)
        assert victim or not stays, f"{c}, though everything stays"

    def _expects(self, visit: t.Visit, expert: t.ExpertId) -> bool:
        """A load was begun for the visit. It is for it that the expert is still to be in a slot."""
        books = self.books
        if visit.layer < 0:
            return expert in books.warm_ups.get(visit.request, ())
        if visit.request in self._failing:
            return False
        return expert.expert in books.predictions.get(visit, ()) or visit.request in books.planned(expert.layer)

    def _new_id(self, number: int) -> None:
        assert number not in self._ids, f"id {number} was used before"
        self._ids.add(number)

    # --- computations -------------------------------------------------------------------------------------------------

    def _compute(self, c: t.Compute, fresh: set[int]) -> None:
        books = self.books
        assert c.worker in books.live, f"{c} to a worker that is gone"
        gate, one = books.gates[c.visit], books.requests[c.visit.request]
        layer, expert = c.expert
        assert gate.united, f"{c} before all gates of the step have fired"
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
        first = c.visit not in attempt.uses
        use = attempt.uses.setdefault(c.visit, Use())
        attempt.used = True
        books.seen["shared"] += first and len(attempt.uses) > 1
        if first and attempt.loaded and not host:
            gate.last_load = max(gate.last_load, attempt.at if in_turn else books.now)
        if in_turn:
            self._in_turn(c, attempt)
        assert c.start == use.sent < c.stop <= gate.rows[expert]
        assert c.stop - c.start <= self.plan.mini_batch
        self._new_id(c.call_id)
        books.seen["several chunks"] += c.start > 0
        use.sent = c.stop
        use.owed.add(c.call_id)
        books.calls[c.call_id] = attempt, c.visit
        if c.evict:
            self._last_call(c, attempt, host)
        if not host:
            self._sent.append(attempt)

    def _last_call(self, c: t.Compute, attempt: Attempt, host: bool) -> None:
        """With this the expert leaves: only where it may not stay, and after all rows of all passes."""
        books = self.books
        assert not host
        assert not attempt.keeps, f"{c}: it stays"
        attempt.last_call, attempt.leaving = c.call_id, True
        self._sealed.append(attempt)
        books.seen["left after several passes"] += len(attempt.uses) > 1

    def _check_last_call(self, attempt: Attempt) -> None:
        """Rows were sent, and no more will follow: the expert leaves with the last of them."""
        books, expert = self.books, attempt.load.expert
        if attempt.keeps or attempt.failed or attempt.last_call or not attempt.uses:
            return
        if books.wanted(expert) or expert in books.dropped:
            return
        unsent = [v for v in books.named(expert) if v not in attempt.uses]
        assert unsent, f"{attempt.load} does not leave with its last rows, though nothing else needs it"

    def _hosted_at(self, c: t.Compute) -> Attempt:
        assert c.expert.expert in self.books.gates[c.visit].hosted, f"{c}: nobody said that the host computes it"
        assert (c.slot, c.evict) == (0, False)
        assert self.books.holds(c.worker, c.expert), f"{c}, which the host place does not hold"
        lying = Attempt(t.Load(c.worker, 0, c.expert, 0), loaded=True, used=True)
        attempt = self.books.hosting.setdefault((c.visit, c.expert.expert), lying)
        assert attempt.load.worker == c.worker, f"{c}: also under way at another host place"
        return attempt

    def _held_at(self, c: t.Compute) -> Attempt:
        attempt = self.books.slots[c.worker, c.slot]
        assert attempt.load.expert == c.expert, f"{c}: the slot holds {attempt.load.expert}"
        assert not attempt.last_call, f"{c} after the last rows, with which the expert leaves"
        return attempt

    def _in_turn(self, c: t.Compute, attempt: Attempt) -> None:
        assert attempt.loaded, f"{c} before its load has ended"
        if self.plan.requests > 1:
            return
        gate = self.books.gates[c.visit]
        awaited = gate.rows.keys() - gate.done - gate.hosted
        under_way = [
            a.load
            for a in self.books.slots.values()
            if a.load.expert.layer == c.visit.layer
            and not a.loaded
            and a.load.expert.expert in awaited
            and a.load.expert not in self._waiting
            and not any(copy.loaded for copy in self.books.slots.values() if copy.load.expert == a.load.expert)
        ]
        assert not under_way, f"{c} before {under_way} have ended"

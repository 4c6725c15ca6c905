"""What the referee of the random worlds hears: what a strategy's objects are asked, and answer, as it happens."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from scheduler import types as t
from scheduler.policies.predictors.base import Forecast
from scheduler.policies.routers import Chosen
from support.worlds.books import Books
from support.worlds.plan import Plan
from support.worlds.records import Gate


class Kept(NamedTuple):
    """What a residency was asked, and said."""

    worker: int
    expert: t.ExpertId
    predicted: bool
    stays: bool


class Listener:
    """Writes it into the books. `keeps`, `victims`, `asked`: what must be borne out by the commands that follow."""

    def __init__(self, plan: Plan) -> None:
        self.books = Books(plan)
        self.keeps: deque[Kept] = deque()
        self.victims: list[tuple[int, t.ExpertId]] = []
        self.asked: list[Gate] = []

    @property
    def seen(self) -> Counter[str]:
        """Which of the interesting things have happened, and how often."""
        return self.books.seen

    @property
    def held(self) -> set[int]:
        """Requests whose gates wait for those of other passes."""
        return {visit.request for visit, gate in self.books.gates.items() if not gate.united}

    def heard_forecasts(self, forecasts: Iterable[Forecast]) -> None:
        for visit, experts, bring in forecasts:
            self.books.predict(visit, experts, experts if bring is None else bring)

    def heard_keeps(self, worker: int, expert: t.ExpertId, predicted: bool, stays: bool) -> None:
        self.keeps.append(Kept(worker, expert, predicted, stays))
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
            self.victims.append((worker, victim))

    def heard_route(self, chosen: Chosen, resident: Collection[int], routed: Chosen) -> None:
        """It sees the rows of all decoding passes at once."""
        books, gates = self.books, self._uniting()
        asked = [gate for gate in gates.values() if not gate.prefill and gate.routed is None]
        assert chosen == tuple(row for gate in asked for row in gate.chosen), f"the router is asked about {chosen}"
        here = books.there(next(iter(gates)).layer)
        assert here == set(resident), f"{here} are resident, the router is told {resident}"
        books.seen["routed"] += routed != chosen
        rows = iter(routed)
        for gate in asked:
            gate.routed = tuple(itertools.islice(rows, len(gate.chosen)))
            gate.rows = dict(Counter(e for row in gate.routed for e in row))
        self.asked += asked

    def heard_placement(
        self, missing: Mapping[int, int], resident: Mapping[int, int], hosted: Collection[int], prefill: bool
    ) -> None:
        """It sees the rows of all passes together."""
        books, gates = self.books, self._uniting()
        rows = sum((Counter(gate.rows) for gate in gates.values()), Counter[int]())
        layer = next(iter(gates)).layer
        rows = Counter({e: count for e, count in rows.items() if books.has_host(t.ExpertId(layer, e))})
        assert {**missing, **resident} == rows, f"the placement is asked about {missing} and {resident}"
        assert prefill == any(gate.prefill for gate in gates.values())
        kept = books.there(layer, kept=True)
        assert kept & set(rows) <= set(resident), f"{kept} are there, {missing} are called missing"
        for gate in gates.values():
            gate.hosted = set(hosted) & set(gate.rows)
        self.asked += gates.values()

    def _uniting(self) -> dict[t.Visit, Gate]:
        """The gates that the core unites just now, in the order of the step. Where a request fails with it, those that
        are held."""
        books = self.books
        visits = set(books.united) or {v for v, gate in books.gates.items() if not gate.united}
        order = list(books.step)
        return {v: books.gates[v] for v in sorted(visits, key=lambda v: order.index(v.request))}

    def heard_warm_up(self, experts: Sequence[t.ExpertId]) -> None:
        books = self.books
        kept = {a.load.expert for a in books.before if a.keeps and not a.failed}
        asking = next(number for number in books.requests if number in books.unwarmed)
        books.unwarmed.remove(asking)
        books.warm_ups[asking] = [expert for expert in experts if expert not in kept]
        books.asked_warm[asking] = set(experts)
        books.seen["warm"] += bool(experts)

"""A strategy whose objects are overheard: the referee is told what each is asked and what it answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from scheduler.policies.placement import Costs, Placement
from scheduler.policies.predictors.base import Forecast, Foresight, Predictor, Scores
from scheduler.policies.residency.base import Residency
from scheduler.policies.routers import Chosen, Router
from scheduler.policies.strategy import Strategy
from scheduler.types import ExpertId, ModelShape, Visit
from support.worlds.listener import Listener


def overheard(strategy: Strategy, referee: Listener) -> Strategy:
    return Strategy(
        _Predictor(strategy.predictor, referee),
        _Residency(strategy.residency, referee),
        _Router(strategy.router, referee),
        _Placement(strategy.placement, referee),
        strategy.precision,
        strategy.predicts,
        host_residency=strategy.host_residency,
    )


class _Predictor:
    def __init__(self, inner: Predictor, referee: Listener) -> None:
        self._inner, self._referee = inner, referee
        self.foresight: Foresight | None = inner.foresight
        self.on_paced, self.on_request_closed = inner.on_paced, inner.on_request_closed

    def _heard(self, forecasts: Iterable[Forecast]) -> list[Forecast]:
        found = list(forecasts)
        self._referee.heard_forecasts(found)
        return found

    def on_pass_begun(self, visit: Visit, rows: int, prefill: bool) -> list[Forecast]:
        return self._heard(self._inner.on_pass_begun(visit, rows, prefill))

    def on_gate_fired(self, visit: Visit, named: Mapping[int, int], scores: Scores, prefill: bool) -> list[Forecast]:
        return self._heard(self._inner.on_gate_fired(visit, named, scores, prefill))

    def on_foreseen(self, visit: Visit, scores: Scores, resident: Collection[int], prefill: bool) -> list[Forecast]:
        return self._heard(self._inner.on_foreseen(visit, scores, resident, prefill))


class _Residency:
    def __init__(self, inner: Residency, referee: Listener) -> None:
        self._inner, self._referee = inner, referee
        self.has_homes, self.wants_scores = inner.has_homes, inner.wants_scores
        self.on_gate_fired, self.on_used, self.full = inner.on_gate_fired, inner.on_used, inner.full

    def check(self, shape: ModelShape, slots: int) -> None:
        self._inner.check(shape, slots)

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        stays = self._inner.keeps(worker, expert, predicted)
        self._referee.heard_keeps(worker, expert, predicted, stays)
        return stays

    def on_left(self, worker: int, expert: ExpertId) -> None:
        self._inner.on_left(worker, expert)
        self._referee.heard_left(expert)

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        goes = self._inner.victim(worker, incoming, evictable)
        self._referee.heard_victim(worker, evictable, goes)
        return goes

    def warm(self, slots: int) -> list[ExpertId]:
        experts = list(self._inner.warm(slots))
        self._referee.heard_warm_up(experts)
        return experts


class _Router:
    def __init__(self, inner: Router, referee: Listener) -> None:
        self._inner, self._referee = inner, referee
        self.exact, self.wants_scores = inner.exact, inner.wants_scores

    def route(self, chosen: Chosen, scores: Scores, resident: Collection[int]) -> Chosen:
        routed = self._inner.route(chosen, scores, resident)
        self._referee.heard_route(chosen, resident, routed)
        return routed


class _Placement:
    def __init__(self, inner: Placement, referee: Listener) -> None:
        self._inner, self._referee = inner, referee

    def host(
        self, missing: Mapping[int, int], resident: Mapping[int, int], costs: Costs, prefill: bool
    ) -> Collection[int]:
        hosted = self._inner.host(missing, resident, costs, prefill)
        self._referee.heard_placement(missing, resident, hosted, prefill)
        return hosted

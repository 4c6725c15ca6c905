"""Choices for random worlds: as small as each may be, and wilder than the product's own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from random import Random

from scheduler.policies import registry
from scheduler.policies.placement import Costs, DeviceOnly, Placement
from scheduler.policies.precision import FULL, INT4, Full, Importance, Precision
from scheduler.policies.predictors.base import (
    Forecast,
    Foresight,
    NoPrediction,
    Predictor,
    PredictorBase,
    RandomPredictor,
    Scores,
)
from scheduler.policies.residency.base import Everything, NoCache, Residency, ResidencyBase
from scheduler.policies.routers import Chosen, Router, TopK
from scheduler.policies.system_config import SystemConfig
from scheduler.types import ExpertId, ModelShape, Visit
from support.worlds.plan import Plan


class LastUsed(ResidencyBase):
    """A policy that evicts: least recently used goes. As small as such a policy should be."""

    def __init__(self) -> None:
        self.order: dict[ExpertId, None] = {}
        self.told: list[tuple[str, tuple[int, ...], bool]] = []

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        return True

    def on_used(self, worker: int, expert: ExpertId, hit: bool, form: str) -> None:
        self.told.append(("used", tuple(expert), hit))
        self.order.pop(expert, None)
        self.order[expert] = None

    def on_left(self, worker: int, expert: ExpertId) -> None:
        self.told.append(("left", tuple(expert), False))
        self.order.pop(expert, None)

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        places = {expert: place for place, expert in enumerate(self.order)}
        return min(evictable, key=lambda expert: places.get(expert, -1))


class EvenStay(LastUsed):
    """Only some may stay, and on every other worker they never make room."""

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        return expert.expert % 2 == 0

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        return None if worker % 2 else super().victim(worker, incoming, evictable)


class LayerQuota(LastUsed):
    """At most two of a layer, one of them makes room. What was predicted stays, and what prefill loaded. When prefill
    is over the first two of each layer are to be there."""

    def __init__(self, shape: ModelShape, quota: int = 2) -> None:
        super().__init__()
        self.shape, self.quota = shape, quota
        self.there: set[ExpertId] = set()
        self.prefill = True

    def on_gate_fired(self, visit: Visit, named: Mapping[int, int], scores: Scores, prefill: bool) -> None:
        self.prefill = prefill

    def keeps(self, worker: int, expert: ExpertId, predicted: bool) -> bool:
        stays = predicted or self.prefill
        self.there |= {expert} if stays else set()
        return stays

    def on_left(self, worker: int, expert: ExpertId) -> None:
        super().on_left(worker, expert)
        self.there.discard(expert)

    def full(self, incoming: ExpertId) -> bool:
        return sum(expert.layer == incoming.layer for expert in self.there) >= self.quota

    def victim(self, worker: int, incoming: ExpertId, evictable: Collection[ExpertId]) -> ExpertId | None:
        full = self.full(incoming)
        mine = [expert for expert in evictable if expert.layer == incoming.layer] if full else evictable
        return super().victim(worker, incoming, mine) if mine else None

    def warm(self, slots: int) -> Iterable[ExpertId]:
        firsts = [ExpertId(layer, e) for e in range(self.quota) for layer in self.shape.layers]
        return [expert for expert in firsts if expert.expert < self.shape.experts][:slots]


class Foreseer(PredictorBase):
    """Says something whenever it is asked, sometimes for a visit that is over, sometimes only what is to be brought."""

    def __init__(self, plan: Plan, foresight: Foresight) -> None:
        super().__init__(plan.shape)
        self.plan, self.foresight = plan, foresight

    def on_pass_begun(self, visit: Visit, rows: int, prefill: bool) -> list[Forecast]:
        return self._guess(Random(f"b{self.plan.seed}{visit}"), visit, prefill, 0.5)

    def on_gate_fired(self, visit: Visit, named: Mapping[int, int], scores: Scores, prefill: bool) -> list[Forecast]:
        rng = Random(f"f{self.plan.seed}{visit}")
        position = (self.plan.prompt if prefill else visit.position + 1) if rng.random() < 0.5 else visit.position
        other = Visit(visit.request, position, rng.randrange(self.plan.layers))
        return self._guess(rng, other, prefill and position == visit.position, 0.3)

    def _guess(self, rng: Random, visit: Visit, prefill: bool, chance: float) -> list[Forecast]:
        if rng.random() > chance or (prefill and self.plan.prefill == "ahead"):
            return []
        return [Forecast(visit, tuple(rng.sample(range(self.plan.experts), self.plan.top_k)))]

    def on_foreseen(self, visit: Visit, scores: Scores, resident: Collection[int], prefill: bool) -> list[Forecast]:
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

    def route(self, chosen: Chosen, scores: Scores, resident: Collection[int]) -> Chosen:
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

    def host(self, missing: Mapping[int, int], resident: Mapping[int, int], costs: Costs, prefill: bool) -> set[int]:
        rng = Random(f"{self.seed}{sorted(missing.items())}{sorted(resident.items())}{prefill}")
        return {e for e in missing if rng.random() < 0.5} | {e for e in resident if rng.random() < 0.1}


class TwoForms:
    """The best of a row is to be whole; anything whole will do."""

    forms: tuple[str, ...] = (FULL, INT4)
    exact, wants_scores = False, True

    def form(self, importance: Importance) -> str:
        return FULL if importance.rank == 0 and importance.rows else INT4

    def serves(self, held: str, importance: Importance) -> bool:
        return held == FULL or self.form(importance) == INT4


# --- a plan's own -----------------------------------------------------------------------------------------------------


def predictor_of(plan: Plan) -> Predictor:
    match plan.predictor:
        case "chance":
            return RandomPredictor(plan.shape, plan.seed)
        case "gate" | "attention" | "token":
            return Foreseer(plan, plan.predictor)
        case _:
            return NoPrediction(plan.shape)


def residency_of(plan: Plan) -> Residency:
    """One of those above, or else of the product's."""
    match plan.policy:
        case "none":
            return NoCache()
        case "all":
            return Everything()
        case "lru":
            return LastUsed()
        case "even":
            return EvenStay()
        case "quota":
            return LayerQuota(plan.shape)
        case _:
            return registry.residency_of(plan.shape, SystemConfig(residency=plan.policy))


def router_of(plan: Plan) -> Router:
    return Wanderer() if plan.router else TopK()


def placement_of(plan: Plan) -> Placement:
    return SomeHosted(plan.seed) if plan.placement else DeviceOnly()


def precision_of(plan: Plan) -> Precision:
    return TwoForms() if plan.forms else Full()

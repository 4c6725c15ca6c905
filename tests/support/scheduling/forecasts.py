"""One row of scores, one gate: what a predictor that reads gates ahead makes of them."""

from __future__ import annotations

from collections.abc import Collection

from scheduler.policies.predictors.base import Forecast, Predictor, Scores
from scheduler.types import ModelShape, Visit

SHAPE = ModelShape((0, 1, 2, 3), 8, 2)
NEXT = Visit(1, 9, 1)
ROW = (0.05, 0.3, 0.1, 0.02, 0.25, 0.03, 0.05, 0.2)  # best first: 1, 4, 7, 2, 0, 6, 5, 3


def forecast_of(
    predictor: Predictor,
    scores: Scores,
    resident: Collection[int] = (),
    prefill: bool = False,
    visit: Visit = NEXT,
) -> Forecast:
    (forecast,) = predictor.on_foreseen(visit, scores, resident, prefill)
    assert forecast.visit == visit
    assert len(set(forecast.experts)) == len(forecast.experts)
    return forecast


def fire(predictor: Predictor, layer: int, *chosen: int, position: int = 9, request: int = 1) -> None:
    assert not list(predictor.on_gate_fired(Visit(request, position, layer), dict.fromkeys(chosen, 1), (), False))


def best(row: tuple[float, ...], k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda e: -row[e])[:k]

"""Gates fired one after the other, for predictors that learn from past gates alone."""

from __future__ import annotations

from scheduler.policies.predictors.base import Forecast, Predictor
from scheduler.types import ModelShape, Visit

SHAPE = ModelShape((0, 2, 3), 6, 2)  # layer 1 is dense


def fired(
    predictor: Predictor, layer: int, rows: dict[int, int], position: int = 0, request: int = 1
) -> list[Forecast]:
    return list(predictor.on_gate_fired(Visit(request, position, layer), rows, (), False))


def token(predictor: Predictor, *chosen: list[int], position: int = 0, request: int = 1) -> list[list[Forecast]]:
    return [
        fired(predictor, layer, dict.fromkeys(experts, 1), position, request)
        for layer, experts in zip(SHAPE.layers, chosen, strict=True)
    ]

"""Counts of right predictions by kind and layer, and predictors that need no tensors, replayed from routes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scheduler.policies.baselines.eap import ActivationPath
from scheduler.policies.baselines.moe_infinity import RequestTraces
from scheduler.policies.predictors.base import Predictor, RandomPredictor
from scheduler.types import ModelShape, Visit

PLAIN: dict[str, Any] = {"path": ActivationPath, "traces": RequestTraces, "random": RandomPredictor}
"""Predictors that learn from what gates chose alone; each begins empty and sees the prompts in their order."""


class Counts:
    """kind -> layer -> [right, of, expected, times]. A mean is kept as its sum over `of` rows."""

    def __init__(self) -> None:
        self.by: dict[str, dict[int, list[float]]] = {}

    @classmethod
    def of(cls, plain: Iterable[dict[str, dict[str, list[float]]]]) -> Counts:
        """The sum of several, as `plain` gave them."""
        found = cls()
        for one in plain:
            for kind, layers in one.items():
                for layer, (right, of, expected, times) in layers.items():
                    found._add(kind, int(layer), right, of, expected, times)
        return found

    def _add(self, kind: str, layer: int, *values: float) -> None:
        sums = self.by.setdefault(kind, {}).setdefault(layer, [0.0, 0.0, 0.0, 0.0])
        for at, value in enumerate(values):
            sums[at] += value

    def add(self, kind: str, layer: int, right: int, of: int, expected: int) -> None:
        self._add(kind, layer, right, of, expected, 1)

    def mean(self, kind: str, layer: int, value: float, count: int) -> None:
        self._add(kind, layer, value * count, count, 0, 1)

    def plain(self) -> dict[str, dict[str, list[float]]]:
        """What JSON can say."""
        return {kind: {str(layer): sums for layer, sums in layers.items()} for kind, layers in self.by.items()}

    def layer(self, kind: str, layer: int) -> float | None:
        """The share that was right in a layer. None: nothing was predicted there."""
        right, of, _, _ = self.by.get(kind, {}).get(layer, [0.0, 0.0, 0.0, 0.0])
        return right / of if of else None

    def overall(self, kind: str) -> float | None:
        """As `layer`, over all layers that it said something of."""
        right = sum(sums[0] for sums in self.by.get(kind, {}).values())
        of = sum(sums[1] for sums in self.by.get(kind, {}).values())
        return right / of if of else None

    def rows(self, layers: Iterable[int]) -> list[dict[str, Any]]:
        """A row a kind and layer, and one with layer `all`. `expected`: experts a forecast, if it is of
        one pass as a whole."""
        found = []
        for kind, known in self.by.items():
            times = sum(sums[3] for sums in known.values())
            each = sum(sums[2] for sums in known.values()) / times
            said = not kind.startswith("cosine") and not kind.endswith("rows")
            found.append(
                {"kind": kind, "layer": "all", "value": self.overall(kind), "expected": each if said else None}
            )
            for layer in layers:
                if (value := self.layer(kind, layer)) is not None:
                    each = known[layer][2] / known[layer][3]
                    found.append({"kind": kind, "layer": layer, "value": value, "expected": each if said else None})
        return found


def replayed(shape: ModelShape, answers: list[list[dict[str, Any]]]) -> list[dict[str, dict[str, list[float]]]]:
    """Counts of every predictor of PLAIN over these answers' routes."""
    return [_replay(name, make(shape), shape, answers).plain() for name, make in PLAIN.items()]


def _replay(name: str, predictor: Predictor, shape: ModelShape, answers: list[list[dict[str, Any]]]) -> Counts:
    counts = Counts()
    for request, answer in enumerate(answers, 1):
        for one in answer:
            prefill = one["position"] == 0
            visit = Visit(request, one["position"], shape.layers[0])
            said = {f.visit: f.experts for f in predictor.on_pass_begun(visit, one["tokens"], prefill)}
            for layer, rows in zip(shape.layers, one["experts"], strict=True):
                of = visit._replace(layer=layer)
                named: dict[int, int] = {}
                for expert in (expert for row in rows for expert in row):
                    named[expert] = named.get(expert, 0) + 1
                if not prefill and of in said:
                    expected = set(said[of])
                    counts.add(name, layer, len(expected & named.keys()), len(named), len(expected))
                said |= {
                    f.visit: f.experts for f in predictor.on_gate_fired(of, dict(sorted(named.items())), (), prefill)
                }
        predictor.on_request_closed(request)
    return counts

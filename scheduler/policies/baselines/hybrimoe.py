"""HybriMoE: a schedule over device, host and link, impact-driven prefetching and a score-aware cache."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from scheduler.policies.placement import Costs
from scheduler.policies.predictors.base import Forecast, Foresight, PredictorBase, Scores
from scheduler.policies.predictors.ranking import best_of_rows, popularity
from scheduler.policies.residency.scores import Scored, Values
from scheduler.types import ModelShape, Visit

ALPHA = 0.05
"""IV-D: the weight of the newest score. The paper leaves it open: of 0.05 to 0.3 the best on half of the requests of
two traces (docs/papers.md)."""


class Hybrid:
    """HybriMoE's schedule, made for every gate, in prefill and in decoding.

    Device, host and link each have a time line. The device computes resident experts first. The host
    takes missing ones from the fewest rows up, the link loads them from the most rows down: each time the one of the
    two that would finish its expert first. An idle host then takes resident experts from the fewest rows up, while that
    ends earlier than the device would.

    Never later than all missing experts on the host, nor than all loaded. Assumed: equal ends go to the host, which
    saves a load; of equal rows the lower number counts as more.
    """

    def host(
        self, missing: Mapping[int, int], resident: Mapping[int, int], costs: Costs, prefill: bool
    ) -> Collection[int]:
        waiting = sorted(missing, key=lambda e: (-missing[e], e))
        device = sum(costs.device_s(rows) for rows in resident.values())
        hosted: list[int] = []
        loads: list[tuple[float, float]] = []  # arrival, seconds of computing
        link_end = host_end = 0.0
        while waiting:
            by_host = host_end + costs.host_s(missing[waiting[-1]])
            computing = costs.device_s(missing[waiting[0]])
            by_device = max(device, link_end + costs.load_s) + computing
            if by_host <= by_device:
                hosted.append(waiting.pop())
                host_end = by_host
            else:
                waiting.pop(0)
                link_end += costs.load_s
                device = by_device
                loads.append((link_end, computing))
        return {*hosted, *_moved_to_host(resident, costs, host_end, loads)}


def _moved_to_host(
    resident: Mapping[int, int], costs: Costs, host_end: float, loads: Sequence[tuple[float, float]]
) -> list[int]:
    """Resident experts that the host computes once it is idle, from `host_end` on."""
    moved: list[int] = []
    computing = sum(costs.device_s(rows) for rows in resident.values())
    for expert in sorted(resident, key=lambda e: (resident[e], -e)):
        device_end = computing
        for arrival, seconds in loads:
            device_end = max(device_end, arrival) + seconds
        host_end += costs.host_s(resident[expert])
        if host_end >= device_end:
            break
        moved.append(expert)
        computing -= costs.device_s(resident[expert])
    return moved


class Impact(PredictorBase):
    """The gates of several next layers on this layer's gate input; the expert whose prefetch is expected to save most
    comes first (HybriMoE, "impact-driven prefetching").

    The benefit, in seconds: the probability that the gate chooses the expert, times its rows, times the part of its
    load that is over before its layer begins. The probability is measured, by layers ahead and rank in the forecast. A
    load of which no part would be hidden does not begin. `prefetch`: most loads per gate, for all layers ahead.

    Assumed: HybriMoE finds the benefit by simulating its schedule on both processors, with and without the expert; here
    it is the hidden loading time, since a predictor does not know what computing costs. Layers are served in the order
    of their forecasts, nearest first, and share one queue of loads until the next gate.
    """

    foresight: Foresight | None = "gates"

    def __init__(self, shape: ModelShape, prefetch: int | None = None) -> None:
        super().__init__(shape)
        self.prefetch = prefetch
        self._ordinal = {layer: ordinal for ordinal, layer in enumerate(shape.layers)}
        self._pace: tuple[float, float] | None = None
        """(seconds of a load, seconds of a layer)."""
        self._at: dict[int, tuple[int, int]] = {}
        """Request -> (layer of its last gate, as an ordinal; loads begun since)."""
        self._forecasts: dict[int, dict[Visit, list[tuple[int, tuple[int, ...]]]]] = {}
        """Request -> visit -> [(layers ahead, experts)], not compared yet."""
        self._compared: dict[tuple[int, int], tuple[int, int]] = {}
        """(Layers ahead, rank) -> (predictions that came true, predictions)."""

    def on_paced(self, load_s: float, layer_s: float) -> None:
        if load_s > 0 and layer_s > 0:
            self._pace = (load_s, layer_s)

    def probability(self, ahead: int, rank: int) -> float:
        """The part of the predictions so many layers ahead, at that rank, that came true; one is counted beforehand."""
        right, total = self._compared.get((ahead, rank), (0, 0))
        return (right + 1) / (total + 1)

    def on_gate_fired(self, visit: Visit, rows: Mapping[int, int], scores: Scores, prefill: bool) -> Iterable[Forecast]:
        self._at[visit.request] = (self._ordinal[visit.layer], 0)
        for ahead, experts in self._forecasts.get(visit.request, {}).pop(visit, ()):
            for rank, expert in enumerate(experts):
                right, total = self._compared.get((ahead, rank), (0, 0))
                self._compared[ahead, rank] = (right + (expert in rows), total + 1)
        return ()

    def on_foreseen(self, visit: Visit, scores: Scores, resident: Collection[int], prefill: bool) -> Iterable[Forecast]:
        if not scores or visit.request not in self._at:
            return ()
        at, queued = self._at[visit.request]
        ahead = self._ordinal[visit.layer] - at
        order, rows = popularity(scores, self.shape.top_k)
        experts = tuple(e for e in order if rows[e])
        if not prefill:
            self._forecasts.setdefault(visit.request, {}).setdefault(visit, []).append((ahead, experts))
        weight = {e: rows[e] * (1.0 if prefill else self.probability(ahead, rank)) for rank, e in enumerate(experts)}
        bring = [e for e in experts if e in resident]
        for expert in sorted((e for e in experts if e not in resident), key=lambda e: -weight[e]):
            if self.prefetch is not None and queued >= self.prefetch:
                break
            if weight[expert] * self._hidden_s(ahead, queued) > 0:
                bring.append(expert)
                queued += 1
        self._at[visit.request] = (at, queued)
        return [Forecast(visit, experts, tuple(bring))]

    def _hidden_s(self, ahead: int, queued: int) -> float:
        """Seconds of a load that are over before its layer begins, with `queued` loads before it on the link."""
        if self._pace is None:
            return 1.0
        load_s, layer_s = self._pace
        return min(load_s, max(0.0, ahead * layer_s - queued * load_s))

    def on_request_closed(self, request: int) -> None:
        self._at.pop(request, None)
        self._forecasts.pop(request, None)


class RecentScore(Scored):
    """HybriMoE's score-aware cache (IV-D, "MRS"): a value S <- alpha TopP(s) + (1 - alpha) S for each expert; the least
    S is evicted. TopP is zero for all but the highest scores of a row.

    Assumed: TopP keeps twice the experts of a token, as the paper mostly has it. S is compared over all layers.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.top = 2 * shape.top_k

    def _shares(self, scores: Values) -> Values:
        shares = super()._shares(scores)
        best = best_of_rows(shares, self.top)
        kept = np.zeros_like(shares)
        np.put_along_axis(kept, best, np.take_along_axis(shares, best, axis=1), axis=1)
        return kept

    def _new_values(self, layer: int, shares: Values) -> Values:
        values: Values = ALPHA * shares + (1 - ALPHA) * np.array(self.value[layer])
        return values

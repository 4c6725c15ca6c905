"""Predictors that only count: which experts followed which, and which request looked like this one. They learn as they
go, from every gate, and keep no more than tables of a fixed size and what belongs to open requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from scheduler.errors import ConfigError
from scheduler.policies.predictors.base import Forecast, Scores, Silent
from scheduler.types import ModelShape, Visit

Table = NDArray[np.float32]


def _first(weights: Table, count: int) -> tuple[int, ...]:
    """Those of the greatest weight, at most `count`, none without any; the lower number first where equal."""
    order = np.argsort(-weights, kind="stable")[:count]
    return tuple(int(e) for e in order if weights[e] > 0)


def _row(named: Mapping[int, int], experts: int) -> Table:
    row = np.zeros(experts, dtype=np.float32)
    row[list(named)] = list(named.values())
    return row


class ActivationPath(Silent):
    """The next layer's experts from how often each followed the experts of this one (expert activation path: Lina, and
    as Fate's baseline EAP has it).

    Counts for each pair of neighbouring layers how often expert b of the next was named for a token for which expert a
    was; expects those with the greatest sum of shares count(a, b) / count(a) over what this gate named, as many as it
    named. Of the first layer, when a decode pass begins: those named most often there.

    Assumed: several tokens in one pass count as if their choices in the two layers had nothing to do with each other,
    rows(a) rows(b) / rows, since a gate says how many rows it sent where, not which. Counts are never forgotten.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self._ordinal = {layer: ordinal for ordinal, layer in enumerate(shape.layers)}
        size = shape.experts
        self._follows = np.zeros((max(len(shape.layers) - 1, 0), size, size), dtype=np.float32)
        self._often = np.zeros((len(shape.layers), size), dtype=np.float32)
        self._last: dict[int, tuple[Visit, Table]] = {}  # request -> what its last gate named

    def begun(self, visit: Visit, rows: int, prefill: bool) -> Iterable[Forecast]:
        expected = _first(self._often[self._ordinal[visit.layer]], self.shape.top_k * rows)
        return () if prefill or not expected else [Forecast(visit, expected)]

    def fired(self, visit: Visit, named: Mapping[int, int], scores: Scores, prefill: bool) -> Iterable[Forecast]:
        at = self._ordinal[visit.layer]
        now = _row(named, self.shape.experts)
        before = self._last.get(visit.request)
        if at and before is not None and before[0] == visit._replace(layer=self.shape.layers[at - 1]):
            rows = max(1.0, float(now.sum()) / self.shape.top_k)
            self._follows[at - 1] += np.outer(before[1], now) / np.float32(rows)
        self._often[at] += now
        self._last[visit.request] = (visit, now)
        if at + 1 == len(self.shape.layers):
            return ()
        expected = _first(self._shares(at, now), len(named))
        return [Forecast(visit._replace(layer=self.shape.layers[at + 1]), expected)] if expected else ()

    def _shares(self, at: int, now: Table) -> Table:
        """How many rows of the next layer's each expert is expected to have, up to a factor."""
        follows = self._follows[at]
        totals = follows.sum(axis=1)
        weights = np.divide(now, totals, out=np.zeros_like(now), where=totals > 0)
        shares: Table = weights @ follows
        return shares

    def closed(self, request: int) -> None:
        self._last.pop(request, None)


class _Trace:
    """How often an open request has named each expert, by layer, and how alike each stored trace is, layer by layer."""

    def __init__(self, layers: int, experts: int, stored: int) -> None:
        self.counts = np.zeros((layers, experts), dtype=np.float32)
        self.alike = np.zeros((stored, layers), dtype=np.float32)
        self.seen = np.zeros(layers, dtype=bool)


class RequestTraces(Silent):
    """The next layers' experts as in that earlier request whose activations were most like this one's so far
    (MoE-Infinity: request-level expert activation matrices and their collection).

    A request's matrix counts how often each expert of each layer was named. Likeness is the cosine of two layers'
    counts, averaged over the layers that the request has been through. After each gate: forecasts for the next `ahead`
    layers, nearest first, of the nearest matrix' most frequent experts, as many as the gate named. A request that ends
    is stored; of `capacity` matrices, the one most like the new one makes room.

    Assumed: `ahead` is 2, where MoE-Infinity queues all layers that follow with a priority that falls with their
    distance; as long as nothing is stored, the request's own counts serve.
    """

    def __init__(self, shape: ModelShape, capacity: int = 64, ahead: int = 2) -> None:
        super().__init__(shape)
        if capacity < 1 or ahead < 1:
            raise ConfigError(f"traces: capacity {capacity}, ahead {ahead}; allowed: 1 and more")
        self.capacity = capacity
        self.ahead = ahead
        self._ordinal = {layer: ordinal for ordinal, layer in enumerate(shape.layers)}
        self._stored = np.zeros((0, len(shape.layers), shape.experts), dtype=np.float32)
        """Each layer's counts, of length 1 as a vector, or 0 where it was never reached."""
        self._open: dict[int, _Trace] = {}

    def begun(self, visit: Visit, rows: int, prefill: bool) -> Iterable[Forecast]:
        trace = self._open.get(visit.request)
        if prefill or trace is None:
            return ()
        return self._ahead(visit, trace, -1, self.shape.top_k * rows)

    def fired(self, visit: Visit, named: Mapping[int, int], scores: Scores, prefill: bool) -> Iterable[Forecast]:
        at = self._ordinal[visit.layer]
        trace = self._open.get(visit.request)
        if trace is None:
            trace = _Trace(len(self.shape.layers), self.shape.experts, len(self._stored))
            self._open[visit.request] = trace
        trace.counts[at] += _row(named, self.shape.experts)
        trace.seen[at] = True
        trace.alike[:, at] = self._stored[:, at] @ _unit(trace.counts[at])
        return self._ahead(visit, trace, at, len(named))

    def _ahead(self, visit: Visit, trace: _Trace, at: int, count: int) -> list[Forecast]:
        like = self._nearest(trace)
        forecasts = []
        for ordinal in range(at + 1, min(at + 1 + self.ahead, len(self.shape.layers))):
            expected = _first(like[ordinal], count)
            if expected:
                forecasts.append(Forecast(visit._replace(layer=self.shape.layers[ordinal]), expected))
        return forecasts

    def _nearest(self, trace: _Trace) -> Table:
        if not len(self._stored):
            return trace.counts
        nearest: Table = self._stored[int(np.argmax(trace.alike[:, trace.seen].sum(axis=1)))]
        return nearest

    def closed(self, request: int) -> None:
        trace = self._open.pop(request, None)
        if trace is None:
            return
        unit = _unit(trace.counts)
        if len(self._stored) < self.capacity:
            self._stored = np.concatenate([self._stored, unit[None]])
        else:
            self._stored[int(np.argmax(trace.alike[:, trace.seen].sum(axis=1)))] = unit
        for other in self._open.values():
            other.alike = np.einsum("cle,le->cl", self._stored, _unit(other.counts))


def _unit(counts: Table) -> Table:
    """Along the last axis of length 1; nothing stays nothing."""
    length = np.linalg.norm(counts, axis=-1, keepdims=True)
    unit: Table = np.divide(counts, length, out=np.zeros_like(counts), where=length > 0)
    return unit

"""Predictions, exact decisions: late, twice, for nothing, and those that the core itself is told by a predictor."""

from __future__ import annotations

from collections import Counter
from random import Random

from scheduler import types as t
from scheduler.policies.predictors.base import Forecast, PredictorBase, RandomPredictor
from support.scheduling.core_driver import Driver, P, compute


def test_late_predictions_are_only_counted() -> None:
    d = Driver(layers=3)
    d.open()
    d.gate(0, 3, 5)
    assert d.predict(0, 3, 4) == []  # while the layer is under way
    d.computed(0, 1)
    d.gate(1, 2)
    d.computed(2)
    assert d.predict(1, 2, 7) == []  # when the layer is over
    d.gate(2, 1)
    d.computed(4)
    d.token(1)
    assert d.predict(2, 1, at=P) == []  # when the pass is over
    assert (d.stats().late, d.stats().reloads, d.in_slots) == (3, 4, {})
    # They count for recall all the same, which asks whether the shadow was right: 1 of 2, 1 of 1, 1 of 1.
    assert (d.stats().overall.correct, d.stats().overall.activated) == (3, 4)


def test_a_prediction_for_a_layer_that_is_over_leaves_the_slots_to_others() -> None:
    d = Driver(workers=1, group=1, layers=2)
    d.open()
    d.gate(0, 3)
    d.computed(0)
    assert d.predict(0, 5) == []
    assert d.predict(1, 6) == ["load 0.0 1/6"]


def test_a_second_prediction_replaces_the_first() -> None:
    d = Driver()
    d.open()
    assert d.predict(0, 3, 5) == ["load 0.0 0/3", "load 1.0 0/5"]
    assert d.predict(0, 3, 6) == ["evict 1.0 0/5", "load 1.0 0/6"]
    assert d.gate(0, 3, 6) == compute("0.0 0/3", "1.0 0/6")


def test_predictions_for_requests_that_are_not_open_are_nothing() -> None:
    d = Driver()
    assert d.predict(0, 3, 5) == []
    d.open()
    d.do(t.RequestClosed(1))
    assert d.predict(0, 3, 5) == []


# --- the core predicts ------------------------------------------------------------------------------------------------


class Says(PredictorBase):
    """The same experts in every layer of a decode pass, when it begins."""

    def __init__(self, *experts: int) -> None:
        super().__init__(t.ModelShape((0, 1, 2), 8, 2, by_layer=(8, 4, 8)))
        self.experts = experts
        self.asked: list[tuple[t.Visit, int, bool]] = []

    def on_pass_begun(self, visit: t.Visit, rows: int, prefill: bool) -> list[Forecast]:
        self.asked.append((visit, rows, prefill))
        return [] if prefill else [Forecast(visit._replace(layer=layer), self.experts) for layer in self.shape.layers]


def test_a_predictor_speaks_when_a_decode_pass_begins_as_a_shadow_would() -> None:
    says = Says(3, 1)
    d = Driver(workers=4, layers=3, predictor=says, shadow=False, by_layer=(8, 4, 8))
    d.prefill(prompt=P)
    assert says.asked.pop() == (t.Visit(1, 0, 0), P, True)
    d = Driver(workers=4, layers=3, predictor=says, shadow=False, by_layer=(8, 4, 8))
    assert d.open() == ["load 0.0 0/3", "load 1.0 0/1", "load 2.0 1/3", "load 3.0 1/1"]
    assert says.asked == [(t.Visit(1, P, 0), 1, False)]
    other = Driver(workers=4, layers=3, shadow=False, by_layer=(8, 4, 8))
    other.open()
    told = [other.predict(layer, 3, 1) for layer in range(3)]
    assert told == [["load 0.0 0/3", "load 1.0 0/1"], ["load 2.0 1/3", "load 3.0 1/1"], []]
    for x in (d, other):
        assert x.gate(0, 3, 5) == [
            "evict 1.0 0/1",
            "compute 0.0 0/3 1@60 0:1 last",
            "load 1.0 0/5",
            "compute 1.0 0/5 1@60 0:1 last",
        ]
    assert (d.stats().overall.recall, d.stats().in_time, d.stats().reloads) == (0.5, 1, 1)
    assert other.stats().overall.recall is None  # no shadow follows, nobody predicts: nothing to compare with


def test_chance_names_each_expert_equally_often_and_always_the_same_for_a_visit() -> None:
    def chance(experts: int, top_k: int, seed: int, layers: int = 1, passes: int = 1) -> list[tuple[int, ...]]:
        predictor = RandomPredictor(t.ModelShape(tuple(range(layers)), experts, top_k), seed)
        assert not predictor.on_pass_begun(t.Visit(1, 0, 0), 9, True)
        said = [f for at in range(passes) for f in predictor.on_pass_begun(t.Visit(1, at, 0), 1, False)]
        assert [f.visit for f in said] == [t.Visit(1, at, layer) for at in range(passes) for layer in range(layers)]
        return [f.experts for f in said]

    said = chance(8, 2, 1, 20, 200)
    assert said == chance(8, 2, 1, 20, 200)
    assert all(len(set(experts)) == 2 for experts in said)
    count = Counter(e for experts in said for e in experts)
    assert set(count) == set(range(8))
    assert all(abs(n - 1000) < 150 for n in count.values())  # five standard deviations
    assert chance(256, 8, 2) != chance(256, 8, 1)
    assert sorted(chance(3, 8, 0)[0]) == [0, 1, 2]


def test_the_recall_of_chance_is_k_over_e() -> None:
    chance = RandomPredictor(t.ModelShape(tuple(range(32)), 8, 2))
    d = Driver(workers=8, layers=32, experts=8, predictor=chance, shadow=False)
    d.open()
    rng = Random(5)
    for index in range(40):
        for layer in range(32):
            d.gate(layer, *rng.sample(range(8), 2), at=P + index)
            for worker in [place[0] for place, calls in d.calls.items() if calls]:
                d.computed(worker)
        d.token(index + 1)
    recall = d.stats().overall.recall
    assert d.stats().overall.activated == 40 * 32 * 2
    assert recall is not None
    assert abs(recall - 2 / 8) < 0.04  # 2560 draws: five standard deviations

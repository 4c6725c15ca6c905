"""Those who predict without anything being computed for them: nobody, and chance."""

from __future__ import annotations

from collections import Counter

from scheduler.policies.predictors.base import NoPrediction, RandomPredictor
from scheduler.types import ModelShape, Visit


def said(predictor: RandomPredictor, position: int) -> list[tuple[int, ...]]:
    return [f.experts for f in predictor.on_pass_begun(Visit(1, position, 0), 1, prefill=False)]


def test_nobody_says_nothing() -> None:
    silent = NoPrediction(ModelShape((0, 1), 4, 2))
    assert silent.foresight is None
    assert not [
        *silent.on_pass_begun(Visit(1, 0, 0), 1, False),
        *silent.on_gate_fired(Visit(1, 0, 0), {1: 1}, (), False),
    ]
    assert not [*silent.on_foreseen(Visit(1, 0, 1), ((0.1, 0.2, 0.3, 0.4),), (), False)]


def test_chance_names_each_expert_equally_often_and_always_the_same_for_a_visit() -> None:
    shape = ModelShape(tuple(range(20)), 8, 2)
    first = [experts for p in range(200) for experts in said(RandomPredictor(shape, 1), p)]
    again = [experts for p in range(200) for experts in said(RandomPredictor(shape, 1), p)]
    assert first == again
    assert all(len(set(experts)) == 2 for experts in first)
    count = Counter(e for experts in first for e in experts)
    assert set(count) == set(range(8))
    assert all(abs(n - 1000) < 150 for n in count.values())  # five standard deviations
    wide = ModelShape((0,), 256, 8)
    assert said(RandomPredictor(wide, 2), 0) != said(RandomPredictor(wide, 1), 0)


def test_chance_names_a_layers_own_experts_for_every_moe_layer() -> None:
    shape = ModelShape((1, 3, 7), 8, 4, by_layer=(8, 3, 4))
    forecasts = list(RandomPredictor(shape).on_pass_begun(Visit(5, 9, 1), 1, prefill=False))
    assert [f.visit for f in forecasts] == [Visit(5, 9, layer) for layer in (1, 3, 7)]
    assert sorted(forecasts[1].experts) == [0, 1, 2]
    assert sorted(forecasts[2].experts) == [0, 1, 2, 3]
    assert all(f.bring is None for f in forecasts)


def test_chance_says_nothing_in_prefill() -> None:
    assert not list(RandomPredictor(ModelShape((0,), 8, 2)).on_pass_begun(Visit(1, 0, 0), 60, prefill=True))

"""The window of scores against its definition, and the shield."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies.precision import FULL
from scheduler.policies.residency.scores import ScoreWindow
from scheduler.types import ExpertId, ModelShape, Visit
from support.scheduling.cache_driver import Device

SHAPE = ModelShape((2, 4), 4, 1)
EVERYONE = [ExpertId(layer, number) for layer in SHAPE.layers for number in range(4)]
ROWS = st.lists(st.tuples(*[st.floats(0.01, 1)] * 4), min_size=1, max_size=3).map(tuple)


def of(layer: int, request: int = 0) -> Visit:
    return Visit(request, 0, layer)


@settings(max_examples=30)
@given(st.integers(1, 5), st.lists(st.tuples(st.sampled_from(SHAPE.layers), ROWS), max_size=30))
def test_the_mean_of_the_last_n_iterations_over_all_experts(window: int, seen: list) -> None:
    policy = ScoreWindow(SHAPE, window)
    for layer, rows in seen:
        policy.on_gate_fired(of(layer), {}, rows, False)
    means = {}
    for expert in EVERYONE:
        last = [rows for layer, rows in seen if layer == expert.layer][-window:]
        each = [sum(row[expert.expert] / math.fsum(row) for row in rows) / len(rows) for rows in last]
        means[expert] = math.fsum(each) / len(each) if each else 1 / 4
    assert all(math.isclose(policy.worth(expert), mean) for expert, mean in means.items())
    for among in (EVERYONE, EVERYONE[1:6], EVERYONE[:1]):
        victim = policy.victim(0, ExpertId(2, 0), among)
        assert victim in among
        assert math.isclose(means[victim], min(means[expert] for expert in among))


def test_an_inactive_expert_with_a_high_score_stays() -> None:
    """Section 5.3: LRU would let go of 1, which was never chosen, and keep 2, which was once."""
    policy = ScoreWindow(SHAPE, 3)
    for named, scores in [(2, (0.1, 0.4, 0.5, 0)), (0, (0.55, 0.45, 0, 0)), (0, (0.55, 0.45, 0, 0))]:
        policy.on_gate_fired(of(2), {named: 1}, (scores,), False)
        policy.on_used(0, ExpertId(2, named), True, FULL)
    among = [ExpertId(2, 1), ExpertId(2, 2)]
    assert policy.victim(0, ExpertId(2, 3), among) == ExpertId(2, 2)


def test_the_shield() -> None:
    policy = ScoreWindow(SHAPE, 2)
    low, high = ExpertId(2, 0), ExpertId(2, 3)
    policy.on_gate_fired(of(2), {0: 1, 1: 1}, ((0.0, 0.1, 0.2, 0.7),), False)
    assert policy.victim(0, ExpertId(2, 1), [low, high]) == high, "the gate has named the other, whatever its score"
    assert policy.victim(0, ExpertId(2, 1), [low]) is None
    policy.on_used(0, low, True, FULL)  # in use: the core does not offer it; idle again: its computation is over
    assert policy.victim(0, ExpertId(2, 1), [low, high]) == low
    policy.on_gate_fired(of(2), {0: 1}, ((0.0, 0.1, 0.2, 0.7),), False)
    assert policy.victim(0, ExpertId(2, 1), [low, high]) == high
    policy.on_gate_fired(of(2, request=1), {1: 1}, ((0.0, 0.1, 0.2, 0.7),), False)
    assert policy.victim(0, ExpertId(2, 1), [low, high]) == high, "another request's gate ends nothing"
    policy.on_gate_fired(of(4), {1: 1}, ((0.0, 0.1, 0.2, 0.7),), False)
    assert policy.victim(0, ExpertId(2, 1), [low, high]) == low, "named, computed elsewhere, and the layer is over"


def test_scores_of_layers_are_compared_as_shares() -> None:
    """Logits' scale differs from layer to layer; and what no layer has seen yet is worth 1 / E."""
    policy = ScoreWindow(SHAPE, 2)
    policy.on_gate_fired(of(2), {}, ((10.0, 20.0, 30.0, 40.0),), False)
    assert policy.victim(0, ExpertId(2, 3), [ExpertId(2, 1), ExpertId(4, 0)]) == ExpertId(2, 1)
    assert policy.victim(0, ExpertId(2, 3), [ExpertId(2, 2), ExpertId(4, 0)]) == ExpertId(4, 0)


def test_without_scores_rows_stand_in() -> None:
    policy = ScoreWindow(SHAPE, 2)
    policy.on_gate_fired(of(2), {1: 3, 2: 1}, (), True)
    assert [policy.worth(expert) for expert in EVERYONE[:4]] == [0, 0.75, 0.25, 0]


def test_it_beats_recency_where_scores_foretell() -> None:
    """Experts come back by score, not by recency: what scores high is chosen again three passes later."""
    shape = ModelShape((0,), 6, 1)
    scored = Device(ScoreWindow(shape, 8), shape, 3)
    hits = 0
    for turn in range(60):
        number = (0, 1, 3, 0, 1, 4, 0, 1, 5)[turn % 9]
        scores = tuple(0.3 if e in (0, 1) else 0.1 for e in range(6))
        [hit] = scored.gate(0, [number], scores=(scores,))
        hits += hit
    assert hits == 60 - 2 - 20, "the first loads of 0 and 1, and each of the others"

"""Figures of a request: equations (2) and (3) on an example worked out by hand, and how long a layer takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler import types as t
from scheduler.core.stats import RecallCounts, RequestStats
from scheduler.core.tempo import Tempo
from scheduler.policies.predictors.base import PredictorBase
from scheduler.types import Visit
from support.scheduling.core_driver import Driver, P

PROMPT = 10

# (token, layer) -> what was activated, what was predicted, how many of it were right. Top-2, three MoE layers.
EXAMPLE = {
    (0, 1): ((0, 5), (5, 0), 2),
    (0, 3): ((1, 2), (2, 7), 1),
    (0, 4): ((3, 4), (6, 7), 0),
    (1, 1): ((0, 1), (0, 1), 2),
    (1, 3): ((6, 7), (7, 6), 2),
    (1, 4): ((2, 3), (3, 2), 2),
    (2, 1): ((4, 5), (4,), 1),
    (2, 3): ((4, 6), (1, 4, 6), 2),
    (2, 4): ((0, 7), (), 0),
}
# Equation (2): right ones over 3 layers x top-2. Equation (3): over all three tokens.
BY_TOKEN = [3 / 6, 6 / 6, 3 / 6]
OVERALL = 12 / 18


def visit(token: int, layer: int) -> Visit:
    return Visit(1, PROMPT + token, layer)


def fill(order: list[tuple[str, tuple[int, int]]]) -> RequestStats:
    stats = RequestStats(PROMPT)
    for what, key in order:
        activated, predicted, _ = EXAMPLE[key]
        if what == "gate":
            stats.add_activation(visit(*key), frozenset(activated))
        else:
            stats.add_prediction(visit(*key), predicted)
    return stats


FACTS = [(what, key) for key in EXAMPLE for what in ("prediction", "gate")]


@given(st.permutations(FACTS))
def test_equations_2_and_3_by_hand_in_whatever_order_facts_come(order: list[tuple[str, tuple[int, int]]]) -> None:
    stats = fill(order)
    assert stats.unmatched_count == 0
    assert [counts.recall for counts in stats.by_index] == BY_TOKEN
    assert stats.overall == RecallCounts(12, 18)
    assert stats.overall.recall == OVERALL
    stats.close()
    assert stats.overall == RecallCounts(12, 18)


def test_equation_3_weighs_experts_not_tokens() -> None:
    """A token with more activated experts counts for more: 1 of 2 and 4 of 4 are 5 of 6, not three quarters."""
    stats = RequestStats(PROMPT)
    stats.add_prediction(visit(0, 1), (0, 7))
    stats.add_activation(visit(0, 1), frozenset({0, 1}))
    for layer in (3, 4):
        stats.add_prediction(visit(1, layer), (0, 1))
        stats.add_activation(visit(1, layer), frozenset({0, 1}))
    assert [counts.recall for counts in stats.by_index] == [0.5, 1.0]
    assert stats.overall.recall == 5 / 6


def test_a_prediction_that_never_comes_is_neither_right_nor_wrong_but_counted_once_the_books_are_closed() -> None:
    stats = RequestStats(PROMPT)
    stats.add_activation(visit(0, 1), frozenset({0, 1}))
    stats.add_activation(visit(0, 3), frozenset({2, 3}))
    stats.add_prediction(visit(0, 3), (2, 7))
    stats.add_activation(visit(1, 1), frozenset({4, 5, 6}))
    stats.orphan()
    assert (stats.unmatched_count, stats.overall, stats.unpredicted) == (0, RecallCounts(1, 2), 0)
    for _ in range(2):
        stats.close()
        assert (stats.overall, stats.unpredicted) == (RecallCounts(1, 2), 5)
        assert [counts.recall for counts in stats.by_index] == [0.5, None]


def test_an_orphan_s_prediction_may_still_come() -> None:
    stats = RequestStats(PROMPT)
    stats.add_activation(visit(0, 1), frozenset({0, 1}))
    stats.orphan()
    stats.add_prediction(visit(0, 1), (0, 7))
    stats.close()
    assert (stats.overall, stats.unpredicted) == (RecallCounts(1, 2), 0)


def test_a_prediction_for_a_layer_that_is_never_reached_counts_for_nothing() -> None:
    stats = RequestStats(PROMPT)
    stats.add_prediction(visit(5, 1), (0, 1))
    stats.close()
    assert (stats.by_index, stats.overall.recall) == ([], None)


def test_the_last_prediction_before_the_gate_counts() -> None:
    stats = RequestStats(PROMPT)
    stats.add_prediction(visit(0, 1), (6, 7))
    stats.add_prediction(visit(0, 1), (0, 7))
    stats.add_activation(visit(0, 1), frozenset({0, 1}))
    stats.add_prediction(visit(0, 1), (0, 1))  # too late to be matched again
    stats.close()
    assert stats.overall == RecallCounts(1, 2)


def test_tokens_without_activations_have_no_recall() -> None:
    stats = RequestStats(PROMPT)
    stats.add_prediction(visit(2, 1), (3,))
    stats.add_activation(visit(2, 1), frozenset({3}))
    assert [counts.recall for counts in stats.by_index] == [None, None, 1.0]


def test_loads_and_stalls_are_kept_by_phase() -> None:
    stats = RequestStats(PROMPT)
    for prefilling, late in [(True, False), (True, False), (False, False), (False, True)]:
        stats.add_load(prefilling, late)
    stats.add_stall(2.0, prefilling=True)
    stats.add_stall(0.5, prefilling=False)
    stats.add_stall(0.25, prefilling=False)
    assert (stats.loads, stats.decode_loads, stats.reloads) == (4, 2, 1)
    assert (stats.prefill_stall_s, stats.stall_s) == (2.0, 0.75)


@pytest.mark.parametrize(("correct", "activated", "recall"), [(0, 0, None), (0, 4, 0.0), (3, 4, 0.75), (4, 4, 1.0)])
def test_recall_of_a_tally(correct: int, activated: int, recall: float | None) -> None:
    assert RecallCounts(correct, activated).recall == recall


def test_hits_are_kept_by_phase() -> None:
    stats = RequestStats(PROMPT)
    for prefilling in (True, False, False):
        stats.reuse(prefilling)
    assert (stats.reused, stats.decode_reused, stats.loads) == (3, 2, 0)


def test_a_gate_that_names_nobody_matches_its_prediction_and_adds_nothing() -> None:
    stats = RequestStats(PROMPT)
    stats.add_activation(visit(0, 1), frozenset())
    assert stats.unmatched_count == 1
    stats.add_prediction(visit(0, 1), (1, 2))
    assert (stats.unmatched_count, stats.overall) == (0, RecallCounts(0, 0))


# --- how long a layer takes without its stalls, as the core passes it to a predictor ---


def test_a_layer_is_from_gate_to_gate_without_the_stall_between() -> None:
    tempo = Tempo()
    assert tempo.layer_s == 0.0
    tempo.begin()
    tempo.gate(10.0, 0.0)
    assert tempo.layer_s == 0.0
    tempo.gate(14.0, 3.0)  # four seconds, three of them waited for
    assert tempo.layer_s == 1.0
    tempo.gate(17.0, 3.0)
    assert tempo.layer_s == 2.0
    tempo.begin()  # what is between passes is no layer
    tempo.gate(100.0, 5.0)
    assert tempo.layer_s == 2.0
    tempo.gate(105.0, 5.0)
    assert tempo.layer_s == 3.0


class Paced(PredictorBase):
    def __init__(self) -> None:
        super().__init__(t.ModelShape((0, 1), 4, 2))
        self.told: list[tuple[float, float]] = []

    def on_paced(self, load_s: float, layer_s: float) -> None:
        self.told.append((load_s, layer_s))


def through(d: Driver, index: int, begins: float) -> None:
    """Two layers; each expert's load takes 5 s after its gate, its computation 1 s, attention 2 s."""
    d.now = begins
    d.token(index)
    for layer in range(2):
        d.now += 2
        d.gate(layer, layer, at=P + index)
        d.now += 5
        d.loaded(0)
        d.now += 1
        d.computed(0)


def test_a_predictor_is_told_at_each_pass_once_both_are_known() -> None:
    predictor = Paced()
    d = Driver(mixed=(), workers=1, layers=2, experts=4, group=1, shadow=False, predictor=predictor)
    d.do(t.WorkerLost(0, "to come again, as one that says how fast it loads"))
    d.do(t.WorkerJoined(0, 1, 0.5))
    d.do(t.RequestOpened(1, P))
    through(d, 0, 100.0)
    assert predictor.told == []
    through(d, 1, 200.0)
    assert predictor.told == [(0.5, 3.0)]  # 2 s attention and 1 s expert


def test_nothing_is_told_where_no_worker_says_how_fast_it_loads() -> None:
    predictor = Paced()
    d = Driver(workers=1, layers=2, experts=4, group=1, shadow=False, predictor=predictor)
    d.do(t.RequestOpened(1, P))
    through(d, 0, 100.0)
    through(d, 1, 200.0)
    assert predictor.told == []


def test_prefill_is_not_measured() -> None:
    predictor = Paced()
    d = Driver(workers=1, layers=2, experts=4, group=1, shadow=False, predictor=predictor, prefill="pipelined")
    d.do(t.WorkerJoined(1, 1, 0.5))
    d.do(t.RequestOpened(1, 4))
    d.do(t.StepStarted((t.Pass(1, 0, 4, prefill=True),)))
    for layer in range(2):
        d.gate(layer, 0, at=0)
        worker = next(place[0] for place, calls in d.calls.items() if calls)
        d.loaded(worker)
        d.computed(worker)
        d.now += 50
    d.token(0, prompt=4)
    assert predictor.told == []

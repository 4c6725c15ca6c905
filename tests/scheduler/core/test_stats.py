"""Equations (2) and (3) on an example worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.stats import RequestLedger, Tally
from scheduler.types import Visit

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


def fill(order: list[tuple[str, tuple[int, int]]]) -> RequestLedger:
    ledger = RequestLedger(PROMPT)
    for what, key in order:
        activated, predicted, _ = EXAMPLE[key]
        if what == "gate":
            ledger.activated(visit(*key), frozenset(activated))
        else:
            ledger.predicted(visit(*key), predicted)
    return ledger


FACTS = [(what, key) for key in EXAMPLE for what in ("prediction", "gate")]


@given(st.permutations(FACTS))
def test_equations_2_and_3_by_hand_in_whatever_order_facts_come(order: list[tuple[str, tuple[int, int]]]) -> None:
    ledger = fill(order)
    assert ledger.unmatched == 0
    assert [tally.recall for tally in ledger.by_index] == BY_TOKEN
    assert ledger.overall == Tally(12, 18)
    assert ledger.overall.recall == OVERALL
    ledger.close()
    assert ledger.overall == Tally(12, 18)


def test_equation_3_weighs_experts_not_tokens() -> None:
    """A token with more activated experts counts for more: 1 of 2 and 4 of 4 are 5 of 6, not three quarters."""
    ledger = RequestLedger(PROMPT)
    ledger.predicted(visit(0, 1), (0, 7))
    ledger.activated(visit(0, 1), frozenset({0, 1}))
    for layer in (3, 4):
        ledger.predicted(visit(1, layer), (0, 1))
        ledger.activated(visit(1, layer), frozenset({0, 1}))
    assert [tally.recall for tally in ledger.by_index] == [0.5, 1.0]
    assert ledger.overall.recall == 5 / 6


def test_a_prediction_that_never_comes_is_neither_right_nor_wrong_but_counted_once_the_books_are_closed() -> None:
    ledger = RequestLedger(PROMPT)
    ledger.activated(visit(0, 1), frozenset({0, 1}))
    ledger.activated(visit(0, 3), frozenset({2, 3}))
    ledger.predicted(visit(0, 3), (2, 7))
    ledger.activated(visit(1, 1), frozenset({4, 5, 6}))
    ledger.orphan()
    assert (ledger.unmatched, ledger.overall, ledger.unpredicted) == (0, Tally(1, 2), 0)
    for _ in range(2):
        ledger.close()
        assert (ledger.overall, ledger.unpredicted) == (Tally(1, 2), 5)
        assert [tally.recall for tally in ledger.by_index] == [0.5, None]


def test_an_orphan_s_prediction_may_still_come() -> None:
    ledger = RequestLedger(PROMPT)
    ledger.activated(visit(0, 1), frozenset({0, 1}))
    ledger.orphan()
    ledger.predicted(visit(0, 1), (0, 7))
    ledger.close()
    assert (ledger.overall, ledger.unpredicted) == (Tally(1, 2), 0)


def test_a_prediction_for_a_layer_that_is_never_reached_counts_for_nothing() -> None:
    ledger = RequestLedger(PROMPT)
    ledger.predicted(visit(5, 1), (0, 1))
    ledger.close()
    assert (ledger.by_index, ledger.overall.recall) == ([], None)


def test_the_last_prediction_before_the_gate_counts() -> None:
    ledger = RequestLedger(PROMPT)
    ledger.predicted(visit(0, 1), (6, 7))
    ledger.predicted(visit(0, 1), (0, 7))
    ledger.activated(visit(0, 1), frozenset({0, 1}))
    ledger.predicted(visit(0, 1), (0, 1))  # too late to be matched again
    ledger.close()
    assert ledger.overall == Tally(1, 2)


def test_tokens_without_activations_have_no_recall() -> None:
    ledger = RequestLedger(PROMPT)
    ledger.predicted(visit(2, 1), (3,))
    ledger.activated(visit(2, 1), frozenset({3}))
    assert [tally.recall for tally in ledger.by_index] == [None, None, 1.0]


def test_loads_and_stalls_are_kept_by_phase() -> None:
    ledger = RequestLedger(PROMPT)
    for prefilling, late in [(True, False), (True, False), (False, False), (False, True)]:
        ledger.load_begun(prefilling, late)
    ledger.stalled(2.0, prefilling=True)
    ledger.stalled(0.5, prefilling=False)
    ledger.stalled(0.25, prefilling=False)
    assert (ledger.loads, ledger.decode_loads, ledger.reloads) == (4, 2, 1)
    assert (ledger.prefill_stall_s, ledger.stall_s) == (2.0, 0.75)


@pytest.mark.parametrize(("correct", "activated", "recall"), [(0, 0, None), (0, 4, 0.0), (3, 4, 0.75), (4, 4, 1.0)])
def test_recall_of_a_tally(correct: int, activated: int, recall: float | None) -> None:
    assert Tally(correct, activated).recall == recall


def test_hits_are_kept_by_phase() -> None:
    ledger = RequestLedger(PROMPT)
    for prefilling in (True, False, False):
        ledger.hit(prefilling)
    assert (ledger.hits, ledger.decode_hits, ledger.loads) == (3, 2, 0)


def test_a_gate_that_names_nobody_matches_its_prediction_and_adds_nothing() -> None:
    ledger = RequestLedger(PROMPT)
    ledger.activated(visit(0, 1), frozenset())
    assert ledger.unmatched == 1
    ledger.predicted(visit(0, 1), (1, 2))
    assert (ledger.unmatched, ledger.overall) == (0, Tally(0, 0))

"""How much an expert is wanted: Fate's popularity and the places and scores of rows, against counting by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policies.importance import LayerImportance, importance_of, shares
from scheduler.policies.precision import Importance
from scheduler.policies.predictors.base import Scores

ROWS = st.lists(st.lists(st.integers(0, 20), min_size=5, max_size=5), min_size=1, max_size=6)


def test_a_share_is_what_more_popular_ones_have_of_all_rows() -> None:
    assert shares({0: 1, 1: 8, 2: 5, 3: 2}) == {1: 0.0, 2: 8 / 16, 3: 13 / 16, 0: 15 / 16}
    assert shares({4: 3, 2: 3}) == {2: 0.0, 4: 0.5}  # of equal ones the lower number counts as more popular
    assert shares({}) == {}
    assert shares({7: 0}) == {7: 0.0}


@given(rows=st.dictionaries(st.integers(0, 20), st.integers(1, 50), min_size=1))
def test_shares_and_rows_together_fill_the_layer(rows: dict[int, int]) -> None:
    """The least popular one's share, and its own part, make up the whole."""
    found, total = shares(rows), sum(rows.values())
    assert min(found.values()) == 0.0
    assert max(found[e] + rows[e] / total for e in rows) == pytest.approx(1.0)
    for one in rows:
        for other in rows:
            assert not (rows[one] > rows[other] and found[one] > found[other])


def test_what_a_gate_says_of_its_experts() -> None:
    """Two rows of three experts, two chosen each: 0.5, 0.3 | 0.2, 0.6 of those."""
    wants = importance_of(((0.5, 0.3, 0.1), (0.2, 0.1, 0.6)), 2, False, {0: 2, 1: 1, 2: 1})
    assert wants.importance_of(0) == Importance(False, False, 2, 0.0, 0.35, 0, 0.0)
    assert wants.importance_of(1) == Importance(False, False, 1, 0.5, 0.3, 1, pytest.approx(0.5 / 0.8))
    assert wants.importance_of(2) == Importance(False, False, 1, 0.75, 0.6, 0, 0.0)


def test_experts_that_a_gate_chose_by_more_than_their_scores_are_the_chosen_ones() -> None:
    """Expert 0 scores best and is not chosen, as where a correction is added: its place is not counted."""
    wants = importance_of(((0.5, 0.1, 0.3),), 2, False, {1: 1, 2: 1}, ((1, 2),))
    assert wants.importance_of(2) == Importance(False, False, 1, 0.5, 0.3, 0, 0.0)
    assert wants.importance_of(1) == Importance(False, False, 1, 0.0, 0.1, 1, pytest.approx(0.75))
    assert wants.importance_of(0).score is None


def test_what_is_foreseen_is_only_predicted_and_each_row_wants_its_best() -> None:
    wants = importance_of(((0.5, 0.3, 0.1), (0.6, 0.1, 0.2)), 2, True)
    assert [wants.importance_of(e).rows for e in range(3)] == [0, 0, 0]
    assert all(wants.importance_of(e).predicted and wants.importance_of(e).prefill for e in range(3))
    assert [wants.importance_of(e).share for e in range(3)] == [0.0, 0.5, 0.75]
    assert wants.importance_of(9).score is None
    assert wants.importance_of(9).rank > 1000


@given(rows=ROWS, k=st.integers(1, 5))
def test_means_and_places_are_those_of_counting(rows: list[list[int]], k: int) -> None:
    scores = tuple(tuple(float(s) for s in row) for row in rows)
    best = [sorted(range(5), key=lambda e, row=row: (-row[e], e))[:k] for row in scores]
    wants = importance_of(scores, k, False)
    assert dict(wants.rows) == dict(Counter(e for row in best for e in row))
    _count(wants, scores, best)


def test_without_scores_only_the_rows_are_known() -> None:
    wants = importance_of((), 2, False, {1: 3, 4: 1})
    assert wants.importance_of(1) == Importance(False, False, 3, 0.0, None, wants.importance_of(9).rank)
    assert importance_of((), 2, True).importance_of(1).rows == 0


@given(data=st.data(), rows=ROWS)
def test_rows_may_have_chosen_other_experts_than_their_best_and_other_numbers_of_them(data: Any, rows: Any) -> None:
    scores = tuple(tuple(float(s) for s in row) for row in rows)
    of_row = st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True)
    chosen = [data.draw(of_row) for _ in rows]
    counted = dict(Counter(e for row in chosen for e in row))
    wants = importance_of(scores, 2, False, counted, tuple(map(tuple, chosen)))
    best = [sorted(of, key=lambda e, row=row: (-row[e], e)) for row, of in zip(scores, chosen, strict=True)]
    _count(wants, scores, best)


def _count(wants: LayerImportance, scores: Scores, best: list[list[int]]) -> None:
    """`best`: each row's experts, best first."""
    named = {e for row in best for e in row}
    assert set(wants.score) == set(wants.rank) == set(wants.better) == named
    for expert in named:
        mine = [(row, chosen) for row, chosen in zip(scores, best, strict=True) if expert in chosen]
        said = wants.importance_of(expert)
        assert said.score == pytest.approx(sum(row[expert] for row, _ in mine) / len(mine))
        assert said.rank == min(chosen.index(expert) for _, chosen in mine)
        before = [sum(row[e] for e in chosen[: chosen.index(expert)]) for row, chosen in mine]
        whole = [sum(row[e] for e in chosen) for row, chosen in mine]
        assert said.better == pytest.approx(min(b / w if w else 0.0 for b, w in zip(before, whole, strict=True)))

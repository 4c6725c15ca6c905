"""Orders of experts by their scores, against sorting by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.policies.predictors.ranking import top_k


@given(row=st.lists(st.integers(0, 5), min_size=1, max_size=9), k=st.integers(1, 4))
def test_the_best_of_a_row_are_those_that_a_stable_sort_puts_first(row: list[int], k: int) -> None:
    scores = tuple(float(score) for score in row)
    assert top_k(scores, k) == [e for _, e in sorted((-score, e) for e, score in enumerate(scores))][:k]

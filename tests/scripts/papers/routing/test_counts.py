"""What gates choose, counted: against counting by hand."""

from __future__ import annotations

import pytest

from scripts.papers.routing.counts import counted, figures, popular

PASSES = [{0: [0.1, 0.6, 0.3, 0.0]}, {0: [0.5, 0.1, 0.38, 0.02]}, {0: [0.0, 0.0, 0.5, 0.5]}]
"""Ranks: 1 2 0 3; 0 2 1 3; 2 3 0 1. Chosen, two each: 1 2; 0 2; 2 3."""


def test_by_hand() -> None:
    layer = counted(PASSES, 4, 2)[0]
    assert (layer.tokens, layer.followed) == (3, 2)
    assert layer.scores == pytest.approx([1.6, 1.18, 0.2, 0.02])
    # Of 1 2 0 3 the next token uses 2 and 0; of 0 2 1 3 the last uses 2 and 3.
    assert layer.reused == [0, 2, 1, 1]
    assert layer.used == [1, 1, 3, 1]
    assert layer.top_score == 6, "0.6 and 0.3 over 0.1, 0.5 and 0.38 over 0.1, 0.5 twice over 0"


def test_two_answers_are_added_and_the_last_token_of_one_is_not_followed_by_the_other() -> None:
    layer = counted(PASSES, 4, 2)[0]
    both = layer + layer
    assert (both.tokens, both.followed, both.used) == (6, 4, [2, 2, 6, 2])
    found = figures(both, [layer.used, layer.used], 2)
    assert found["first"] == pytest.approx(1.6 / 2.78)
    assert found["best_left"] == pytest.approx(0.2 / 2.78)
    assert (found["reused_first"], found["again"], found["top_score"]) == (0, 0.5, 2)
    assert found["popular"] == found["popular_in_domain"] == 0.5


def test_the_most_used_quarter() -> None:
    assert popular([0, 4, 1, 3]) == 0.5
    assert popular([5, 5]) == 0.5, "one expert at least"

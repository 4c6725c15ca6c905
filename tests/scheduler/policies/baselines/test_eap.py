"""The activation path, against counting over the whole history."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies.baselines.eap import ActivationPath
from scheduler.policies.predictors.base import Forecast
from scheduler.types import Visit
from support.scheduling.gate_history import SHAPE, fired, token

TOKENS = st.lists(
    st.tuples(*[st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True)] * 3), min_size=1, max_size=12
)


@settings(max_examples=60)
@given(TOKENS)
def test_the_path_predicts_what_followed_most_often(tokens: list[tuple[list[int], ...]]) -> None:
    eap = ActivationPath(SHAPE)
    history: list[tuple[list[int], ...]] = []
    for position, chosen in enumerate(tokens):
        said = token(eap, *chosen, position=position)
        for at in (0, 1):
            pairs = Counter((a, b) for past in history for a in past[at] for b in past[at + 1])
            totals = Counter(a for past in history for a in past[at] for _ in past[at + 1])
            worth = {b: sum(pairs[a, b] / totals[a] for a in chosen[at] if totals[a]) for b in range(6)}
            expected = sorted((w for w in worth.values() if w > 0), reverse=True)[:2]
            if not expected:
                assert said[at] == []
                continue
            (forecast,) = said[at]
            assert forecast.visit == Visit(1, position, SHAPE.layers[at + 1])
            assert [worth[e] for e in forecast.experts] == pytest.approx(expected)
        assert said[2] == []
        history.append(chosen)


def test_when_a_pass_begins_the_first_layers_most_frequent_are_expected() -> None:
    eap = ActivationPath(SHAPE)
    assert not list(eap.on_pass_begun(Visit(1, 1, 0), 1, False))
    for position, chosen in enumerate(([4, 1], [4, 2], [4, 1], [0, 1])):
        token(eap, chosen, [0, 1], [0, 1], position=position)
    assert list(eap.on_pass_begun(Visit(9, 4, 0), 1, False)) == [Forecast(Visit(9, 4, 0), (1, 4))]
    assert not list(eap.on_pass_begun(Visit(9, 4, 0), 60, True))


def test_a_path_is_that_of_one_token() -> None:
    """Neither another request's gate in between nor the layer before of another token counts as what came before."""
    eap = ActivationPath(SHAPE)
    fired(eap, 0, {1: 1, 2: 1}, request=1)
    fired(eap, 0, {4: 1, 5: 1}, request=2)
    fired(eap, 2, {0: 1, 3: 1}, request=1)
    assert fired(eap, 0, {1: 1, 2: 1}, request=3)[0].experts == (0, 3)
    assert fired(eap, 0, {4: 1, 5: 1}, request=4) == []
    fired(eap, 2, {1: 1, 2: 1}, position=7, request=4)  # its layer 0 was at position 0
    assert fired(eap, 0, {4: 1, 5: 1}, request=5) == []


def test_of_a_pass_of_many_tokens_popularity_is_learned() -> None:
    eap = ActivationPath(SHAPE)
    fired(eap, 0, {0: 9, 1: 1})
    fired(eap, 2, {3: 8, 4: 2})
    assert fired(eap, 0, {0: 1, 5: 1}, 1)[0].experts == (3, 4)


def test_a_pass_of_many_tokens_counts_as_that_many_and_no_more() -> None:
    """Ten tokens of prefill with 3 after 0, then twelve alone with 5 after 0."""
    eap = ActivationPath(SHAPE)
    fired(eap, 0, {0: 10, 1: 10})
    fired(eap, 2, {3: 10, 4: 10})
    for position in range(10, 22):
        fired(eap, 0, {0: 1, 2: 1}, position)
        fired(eap, 2, {5: 1, 2: 1}, position)
    assert fired(eap, 0, {0: 1}, 30)[0].experts == (2,)
    assert fired(eap, 0, {0: 1, 1: 1}, 31)[0].experts == (3, 4)

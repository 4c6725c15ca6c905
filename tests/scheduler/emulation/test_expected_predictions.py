"""What the shadow still owes: until the last layer of what was announced has come, its next prediction."""

from __future__ import annotations

import math

import pytest

from scheduler.emulation.expected_predictions import ExpectedPredictions
from scheduler.timing.profile import find_profile

PROFILE = find_profile("rtx3090-1gbe")
STEP_S = PROFILE.shadow_layer_s + PROFILE.hop_s
LAST = 3


@pytest.fixture
def awaited() -> ExpectedPredictions:
    return ExpectedPredictions(PROFILE, LAST)


def test_nothing_is_owed_that_was_not_announced(awaited: ExpectedPredictions) -> None:
    assert awaited.until() == math.inf
    awaited.announced(1, 0, 10.0)
    awaited.predicted(1, 5, 0, 10.0)
    assert awaited.until() == math.inf, "of a request that was not opened"
    awaited.opened(1, 5)
    assert awaited.until() == math.inf


def test_a_pass_is_owed_layer_by_layer(awaited: ExpectedPredictions) -> None:
    awaited.opened(1, 5)
    awaited.announced(1, 0, 10.0)
    assert awaited.until() == pytest.approx(10 + STEP_S)
    for layer in range(LAST):
        awaited.predicted(1, 5, layer, 10.5 + layer)
        assert awaited.until() == pytest.approx(10.5 + layer + STEP_S)
    awaited.predicted(1, 5, LAST, 14.0)
    assert awaited.until() == math.inf
    awaited.announced(1, 1, 15.0)
    assert awaited.until() == pytest.approx(15 + STEP_S)
    awaited.closed(1)
    assert awaited.until() == math.inf


def test_a_shadow_that_is_ahead_owes_nothing(awaited: ExpectedPredictions) -> None:
    awaited.opened(1, 5)
    awaited.announced(1, 0, 10.0)
    awaited.predicted(1, 6, LAST, 11.0)
    assert awaited.until() == math.inf
    awaited.announced(1, 1, 12.0)
    assert awaited.until() == math.inf, "it has predicted that already"
    awaited.announced(1, 2, 13.0)
    awaited.predicted(1, 6, LAST, 10.0)
    assert awaited.until() == pytest.approx(13 + STEP_S), "neither time nor positions go back"


def test_of_several_requests_the_earliest_counts(awaited: ExpectedPredictions) -> None:
    for request, at in ((1, 20.0), (2, 10.0), (3, 30.0)):
        awaited.opened(request, 5)
        awaited.announced(request, 0, at)
    assert awaited.until() == pytest.approx(10 + STEP_S)
    awaited.predicted(2, 5, LAST, 11.0)
    assert awaited.until() == pytest.approx(20 + STEP_S)


def test_what_was_given_up_is_owed_again_with_the_next_announcement(awaited: ExpectedPredictions) -> None:
    awaited.opened(1, 5)
    awaited.announced(1, 0, 10.0)
    awaited.give_up()
    assert awaited.until() == math.inf
    awaited.announced(1, 0, 12.0)
    assert awaited.until() == math.inf
    awaited.announced(1, 1, 13.0)
    assert awaited.until() == pytest.approx(13 + STEP_S)

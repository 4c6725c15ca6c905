"""What the shadow still owes: after an announcement its next prediction, until it says that it has none."""

from __future__ import annotations

import math

import pytest

from scheduler.emulation.expected_predictions import ExpectedPredictions
from scheduler.timing.profile import find_profile

PROFILE = find_profile("rtx3090-1gbe")
STEP_S = PROFILE.shadow_layer_s + PROFILE.hop_s


@pytest.fixture
def awaited() -> ExpectedPredictions:
    return ExpectedPredictions(PROFILE)


def test_nothing_is_owed_that_was_not_announced(awaited: ExpectedPredictions) -> None:
    assert awaited.until() == math.inf
    awaited.on_announced(1, 0, 10.0)
    awaited.on_progress(1, None, 10.0)
    awaited.on_progress(1, 0, 10.0)
    assert awaited.until() == math.inf, "of a request that was not opened"
    awaited.on_opened(1)
    assert awaited.until() == math.inf


def test_a_pass_is_owed_prediction_by_prediction(awaited: ExpectedPredictions) -> None:
    awaited.on_opened(1)
    awaited.on_announced(1, 0, 10.0)
    assert awaited.until() == pytest.approx(10 + STEP_S)
    for after_s in (0.5, 1.5, 7.0):  # of one pass, or of one that runs ahead after it
        awaited.on_progress(1, None, 10 + after_s)
        assert awaited.until() == pytest.approx(10 + after_s + STEP_S)
    awaited.on_progress(1, 0, 17.0)
    assert awaited.until() == math.inf
    awaited.on_announced(1, 1, 18.0)
    assert awaited.until() == pytest.approx(18 + STEP_S)
    awaited.on_closed(1)
    assert awaited.until() == math.inf


def test_what_stands_is_not_predicted_anew(awaited: ExpectedPredictions) -> None:
    """A shadow that was ahead has nothing to say, but that."""
    awaited.on_opened(1)
    awaited.on_announced(1, 0, 10.0)
    awaited.on_progress(1, 0, 11.0)
    awaited.on_announced(1, 1, 12.0)
    awaited.on_progress(1, 1, 12.0)
    assert awaited.until() == math.inf


def test_a_pass_in_flight_is_owed_from_its_last_prediction_on(awaited: ExpectedPredictions) -> None:
    """An announcement in the midst of a pass puts its next prediction off no further, and what the shadow said of an
    earlier one is not about this one."""
    awaited.on_opened(1)
    awaited.on_announced(1, 0, 10.0)
    awaited.on_progress(1, None, 11.0)
    awaited.on_announced(1, 1, 12.0)
    assert awaited.until() == pytest.approx(11 + STEP_S)
    awaited.on_progress(1, 0, 11.5)
    assert awaited.until() == pytest.approx(11.5 + STEP_S)
    awaited.on_progress(1, None, 10.0)
    assert awaited.until() == pytest.approx(11.5 + STEP_S), "time does not go back"


def test_of_several_requests_the_earliest_counts(awaited: ExpectedPredictions) -> None:
    for request, at in ((1, 20.0), (2, 10.0), (3, 30.0)):
        awaited.on_opened(request)
        awaited.on_announced(request, 0, at)
    assert awaited.until() == pytest.approx(10 + STEP_S)
    awaited.on_progress(2, 0, 11.0)
    assert awaited.until() == pytest.approx(20 + STEP_S)


def test_what_was_given_up_is_owed_again_with_the_next_announcement(awaited: ExpectedPredictions) -> None:
    awaited.on_opened(1)
    awaited.on_announced(1, 0, 10.0)
    awaited.give_up()
    assert awaited.until() == math.inf
    awaited.on_announced(1, 0, 12.0)
    assert awaited.until() == math.inf
    awaited.on_announced(1, 1, 13.0)
    assert awaited.until() == pytest.approx(13 + STEP_S)

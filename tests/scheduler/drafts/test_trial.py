"""Drafts that lose time are put off, for longer each time, until they win or many more of them are right."""

from __future__ import annotations

from scheduler.drafts.trial import Trial


def alone(trial, steps, seconds=1.0):
    for _ in range(steps):
        trial.on_step_ended(1, False, 0.5, 1, seconds)


def lose(trial):
    """Steps with drafts, twice as long as without, until they are put off. Returns their number."""
    steps = 0
    while trial.allows(0.5):
        trial.on_step_ended(1, True, 0.5, 1, 2.0)
        steps += 1
        assert steps < 100
    return steps


def test_drafts_are_tried_once_steps_without_them_were_measured():
    trial = Trial()
    alone(trial, 2)
    assert not trial.allows(1.0)
    alone(trial, 1)
    assert trial.allows(1.0)


def test_those_that_lose_are_put_off_for_longer_each_time():
    trial, pauses = Trial(), []
    alone(trial, 3)
    for _ in range(5):
        assert lose(trial) == 5
        steps = 0
        while not trial.allows(0.5):
            alone(trial, 1)
            steps += 1
        pauses.append(steps)
    assert pauses == [192, 384, 768, 1024, 1024]


def test_they_come_back_at_once_where_many_more_are_right():
    trial = Trial()
    alone(trial, 3)
    lose(trial)
    assert not trial.allows(0.65)
    assert trial.allows(0.75)


def test_those_that_win_may_lose_for_a_while():
    trial = Trial()
    alone(trial, 3)
    for _ in range(50):
        trial.on_step_ended(1, True, 0.9, 4, 1.0)
    assert lose(trial) == 13


def test_requests_together_are_compared_with_as_many_without():
    trial = Trial()
    for requests in (8, 1):
        for _ in range(3):
            trial.on_step_ended(requests, False, 0.9, requests, float(requests))
    for _ in range(100):
        trial.on_step_ended(8, True, 0.9, 8, 8.0)
    assert trial.allows(0.9)
    for _ in range(100):
        trial.on_step_ended(7, True, 0.9, 7, 8.0)  # of a number without a measure, the nearest one's
    assert trial.allows(0.9)

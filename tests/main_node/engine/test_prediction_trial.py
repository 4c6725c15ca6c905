"""What is measured of steps with predictions and without, and what follows."""

from __future__ import annotations

import itertools

from main_node.engine.prediction_trial import BLOCK, HOLDS, PAIRS, WARM, PredictionTrial

TRIAL = 2 * PAIRS * BLOCK


def run(trial: PredictionTrial, steps: int, with_s: float, without_s: float, rows: int = 1) -> list[bool]:
    """Steps that take so long. Returns whether each had predictions."""
    made = []
    for _ in range(steps):
        made.append(trial.predicts)
        trial.on_step(rows, with_s if trial.predicts else without_s)
    return made


def started(weighs: bool = True) -> PredictionTrial:
    """A trial that begins with the next step."""
    trial = PredictionTrial(weighs)
    assert run(trial, WARM + 1, 9.0, 9.0) == [True] * (WARM + 1)
    return trial


def test_predictions_that_cost_more_than_they_save_are_left_out() -> None:
    trial = started()
    made = run(trial, TRIAL, 3.0, 2.0)
    assert [(kind, len([*same])) for kind, same in itertools.groupby(made)] == [(True, BLOCK), (False, BLOCK)] * PAIRS
    assert (trial.step_s, trial.predicts) == ((3.0, 2.0), False)


def test_predictions_that_save_time_are_made() -> None:
    trial = started()
    run(trial, TRIAL, 2.0, 3.0)
    assert (trial.step_s, trial.predicts) == ((2.0, 3.0), True)


def test_an_outcome_holds_until_the_next_trial_finds_another() -> None:
    trial = started()
    run(trial, TRIAL, 3.0, 2.0)
    assert run(trial, HOLDS, 3.0, 2.0) == [False] * HOLDS
    run(trial, TRIAL, 2.0, 3.0)
    assert (trial.step_s, trial.predicts) == ((2.0, 3.0), True)


def test_the_first_step_of_a_block_and_single_slow_ones_do_not_count() -> None:
    trial = started()
    for step in range(TRIAL):
        slow = step % BLOCK == 0 or (trial.predicts and step % (2 * BLOCK) == 1)
        trial.on_step(1, 50.0 if slow else 2.0 if trial.predicts else 3.0)
    assert (trial.step_s, trial.predicts) == ((2.0, 3.0), True)


def test_other_rows_begin_a_trial_anew() -> None:
    trial = started()
    run(trial, TRIAL - 1, 3.0, 2.0)
    run(trial, TRIAL, 1.0, 2.0, rows=2)
    assert (trial.step_s, trial.predicts) == (None, False)  # its last block, one step short
    run(trial, 1, 1.0, 2.0, rows=2)
    assert (trial.step_s, trial.predicts) == ((1.0, 2.0), True)


def test_where_nothing_is_weighed_predictions_are_always_made() -> None:
    trial = started(weighs=False)
    assert all(run(trial, TRIAL + HOLDS, 3.0, 2.0))
    assert trial.step_s is None

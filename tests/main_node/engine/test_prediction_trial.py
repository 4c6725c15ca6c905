"""What is measured of steps with predictions and without, and what follows."""

from __future__ import annotations

import itertools
import random

from main_node.engine.prediction_trial import BLOCK, ENOUGH, HOLDS, WARM, PredictionTrial

PAIRS = ENOUGH // (BLOCK - 1)
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
    assert run(trial, WARM, 9.0, 9.0) == [True] * WARM
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


def test_predictions_that_may_cost_more_by_chance_are_made() -> None:
    trial = started()
    run(trial, TRIAL, 3.06, 3.0)
    assert (trial.step_s, trial.predicts) == ((3.06, 3.0), True)
    run(trial, HOLDS + TRIAL, 3.12, 3.0)
    assert (trial.step_s, trial.predicts) == ((3.12, 3.0), False)


def test_steps_of_equally_many_rows_are_compared_however_their_number_changes() -> None:
    """A step takes as long as it has rows, and a tenth longer with predictions. After the trial its outcome stays."""
    for most in (2, 5, 40):
        trial, rng = started(), random.Random(most)
        for _ in range(100 * TRIAL):
            rows = rng.randint(1, most)
            trial.on_step(rows, 1.1 * rows if trial.predicts else rows)
            if trial.step_s:
                break
        assert trial.step_s is not None
        with_s, without_s = trial.step_s
        assert (with_s, trial.predicts) == (1.1 * without_s, False)
        made = [run(trial, 1, 1.0, 1.0, rows=1 + step % most) for step in range(HOLDS)]
        assert made == [[False]] * HOLDS


def test_a_new_number_of_rows_that_stays_is_tried() -> None:
    trial = started()
    for rows in range(1, 30):
        run(trial, 7, 3.0, 2.0, rows)
    run(trial, TRIAL + BLOCK, 1.0, 2.0, rows=30)
    assert (trial.step_s, trial.predicts) == ((1.0, 2.0), True)


def test_where_nothing_is_weighed_predictions_are_always_made() -> None:
    trial = started(weighs=False)
    assert all(run(trial, TRIAL + HOLDS, 3.0, 2.0))
    assert trial.step_s is None

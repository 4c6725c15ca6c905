"""HOBBIT: which layer's loads begin, and in which form."""

from __future__ import annotations

from scheduler.policies.baselines.hobbit import Mixed, Stacked
from scheduler.policies.precision import FULL, INT4, Importance
from scheduler.policies.predictors.base import Forecast
from scheduler.types import Visit
from support.scheduling.forecasts import ROW, SHAPE, fire, forecast_of


def test_stacked_loads_for_the_nearest_layer_that_lacks_something() -> None:
    hobbit = Stacked(SHAPE)
    fire(hobbit, 0, 5, 6)
    assert forecast_of(hobbit, (ROW,), {1, 4}, visit=Visit(1, 9, 1)).bring is None  # all there: look further
    assert forecast_of(hobbit, (ROW,), {1}, visit=Visit(1, 9, 2)).bring is None  # lacks 4
    assert forecast_of(hobbit, (ROW,), (), visit=Visit(1, 9, 3)) == Forecast(Visit(1, 9, 3), (1, 4), ())
    assert forecast_of(hobbit, (ROW,), {4}, visit=Visit(1, 9, 3)).bring == (4,)  # perhaps brought at an earlier gate
    assert forecast_of(hobbit, (ROW,), (), visit=Visit(2, 9, 3)).bring is None  # another request's gate
    fire(hobbit, 1, 1, 4)
    assert forecast_of(hobbit, (ROW,), (), visit=Visit(1, 9, 3)).bring is None
    one = Stacked(SHAPE, prefetch=1)
    assert forecast_of(one, (ROW,), {1}, visit=Visit(1, 9, 1)).bring == (1,)  # 4 would not be brought: not lacking
    assert forecast_of(one, (ROW,), (), visit=Visit(1, 9, 2)).bring == (1,)


def test_nothing_of_a_closed_request_is_kept() -> None:
    predictor = Stacked(SHAPE)
    empty = {name: str(value) for name, value in vars(predictor).items()}
    for request in range(5):
        fire(predictor, 0, 5, request=request)
        forecast_of(predictor, (ROW,), (), visit=Visit(request, 9, 1))
        predictor.closed(request)
    assert {name: str(value) for name, value in vars(predictor).items()} == empty


def importance(rows: int = 1, rank: int = 0, better: float | None = None) -> Importance:
    return Importance(False, rows == 0, rows, 0.0, None, rank, better)


def test_hobbits_rule() -> None:
    """T1 = 0.6: of two with weights 0.7 and 0.3, the second is unimportant; of 0.55 and 0.45 it is not."""
    hobbit = Mixed()
    assert [hobbit.form(importance(better=b)) for b in (0.0, 0.55, 0.6, 0.7)] == [FULL, FULL, FULL, INT4]
    assert [hobbit.form(importance(0, rank=r)) for r in (0, 1, 5)] == [FULL, INT4, INT4]  # only predicted
    assert not hobbit.serves(INT4, importance(better=0.1))
    assert hobbit.serves(INT4, importance(better=0.9))
    assert hobbit.serves(FULL, importance(better=0.9))

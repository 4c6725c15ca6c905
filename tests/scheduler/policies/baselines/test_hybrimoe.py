"""HybriMoE: its schedule, its prefetching and its running score, by hand and against exhaustive search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies.baselines.hybrimoe import Hybrid, Impact, RecentScore
from scheduler.policies.placement import Costs, PrefillPipeline
from scheduler.policies.predictors.base import Forecast
from scheduler.types import ExpertId, ModelShape, Visit
from support.scheduling.forecasts import NEXT, ROW, SHAPE, fire, forecast_of
from support.scheduling.splits import COSTS, DEAR, ROWS, ends


def test_hybrimoe_by_hand() -> None:
    """Loads 10, device 1, host 3 a row. Rows 4, 3, 2, 1: host takes 1 (3 < 11), 2 (9 < 11); 3 more rows there would end
    at 18, the load of the 4 rows at 11; then 18 against 21: the host's."""
    assert set(Hybrid().host({0: 4, 1: 3, 2: 2, 3: 1}, {}, DEAR, False)) == {1, 2, 3}
    slow = Costs(load_s=1, device_call_s=10, device_row_s=0, host_call_s=0, host_row_s=3)
    assert set(Hybrid().host({}, {4: 1, 5: 2, 6: 9}, slow, False)) == {4, 5}  # 3 < 30, 9 < 20; 36 > 10
    assert set(Hybrid().host({}, {4: 1, 5: 2, 6: 5}, slow, False)) == {4, 5}  # 24 > 10, which is all that is left there
    assert not set(Hybrid().host({}, {4: 1}, DEAR, False))  # 3 s on an idle host, 1 s where it is


@settings(max_examples=120)
@given(ROWS, ROWS, COSTS)
def test_hybrimoe_is_never_later_than_the_host_or_the_device_alone(
    missing: dict[int, int], others: dict[int, int], costs: Costs
) -> None:
    resident = {e + 100: n for e, n in others.items()}
    host = set(Hybrid().host(missing, resident, costs, False))
    end = max(ends(missing, resident, host, costs))
    assert end <= max(ends(missing, resident, set(missing), costs))
    assert end <= max(ends(missing, resident, set(), costs))
    assert host <= {*missing, *resident}


@given(ROWS, ROWS, COSTS)
def test_hybrimoe_is_the_best_of_all_splits_by_rows_and_so_never_behind_smoes_algorithm_1(
    missing: dict[int, int], resident: dict[int, int], costs: Costs
) -> None:
    """Every split that gives the host the experts with the fewest rows; Algorithm 1's is one where a row costs the host
    at least what it costs the device."""
    resident = {e: n for e, n in resident.items() if e not in missing}
    mine = max(ends(missing, resident, set(Hybrid().host(missing, resident, costs, True)), costs))
    order = sorted(missing, key=lambda e: (-missing[e], e))
    assert mine <= min(max(ends(missing, resident, set(order[k:]), costs)) for k in range(len(order) + 1))
    if costs.host_row_s >= costs.device_row_s:
        smoe = set(PrefillPipeline().host(missing, resident, costs, True))
        assert mine <= max(ends(missing, resident, smoe, costs))


def test_impact_begins_no_load_that_would_hide_nothing() -> None:
    """A layer takes 10, a load 8: of one queue, loads begin at 0, 8, 16; layer 1 begins at 10, 2 at 20."""
    impact = Impact(SHAPE)
    impact.on_paced(8, 10)
    fire(impact, 0, 5)
    wide = (ROW, (0.0, 0.0, 0.0, 0.4, 0.0, 0.3, 0.0, 0.0))
    assert forecast_of(impact, wide, {4}, visit=Visit(1, 9, 1)) == Forecast(Visit(1, 9, 1), (3, 5, 1, 4), (4, 3, 5))
    assert forecast_of(impact, (ROW,), (), visit=Visit(1, 9, 2)).bring == (1,)
    assert forecast_of(impact, (ROW,), (), visit=Visit(1, 9, 3)).bring == (1,)  # begins at 24, layer 3 at 30
    fire(impact, 1, 1)
    assert forecast_of(impact, (ROW,), (), visit=Visit(1, 9, 2)).bring == (1, 4)


def test_impact_without_measurements_brings_the_top_k_and_never_more_than_it_may() -> None:
    impact = Impact(SHAPE, prefetch=3)
    assert not list(impact.on_foreseen(NEXT, (ROW,), (), False))  # no gate so far: nobody knows how far ahead
    fire(impact, 0, 5)
    assert [forecast_of(impact, (ROW,), (), visit=Visit(1, 9, n)).bring for n in (1, 2, 3)] == [(1, 4), (1,), ()]


def test_impact_brings_first_what_has_come_true_more_often() -> None:
    """The second place comes true always, the first never: the second is worth more from then on."""
    impact = Impact(SHAPE)
    impact.on_paced(8, 4)  # one load a layer
    for position in range(4):
        fire(impact, 0, 5, position=position)
        forecast = forecast_of(impact, (ROW,), (), visit=Visit(1, position, 1))
        assert forecast.experts == (1, 4)
        assert forecast.bring == ((1,) if position == 0 else (4,))
        fire(impact, 1, 4, 6, position=position)
    assert (impact.probability(1, 0), impact.probability(1, 1), impact.probability(2, 0)) == (1 / 5, 1, 1)


def test_impact_weighs_how_likely_by_how_many_rows() -> None:
    """The first place is right half as often as the others; three rows want it, one row each of the others."""
    impact = Impact(SHAPE)
    fire(impact, 0, 5)
    forecast_of(impact, (ROW,))
    fire(impact, 1, 4, 6)
    assert (impact.probability(1, 0), impact.probability(1, 1)) == (0.5, 1.0)
    fire(impact, 0, 5, position=10)
    rows = tuple(tuple(4.0 * (e == 1) + 0.1 * e * (e == second) for e in range(8)) for second in (4, 7, 2))
    forecast = forecast_of(impact, rows, visit=Visit(1, 10, 1))
    assert forecast.bring == (1, 7, 4, 2)


def test_impact_in_prefill_weighs_by_rows() -> None:
    impact = Impact(SHAPE)
    list(impact.on_gate_fired(Visit(1, 0, 0), {1: 3}, (), True))
    two = (0.0, 0.0, 0.0, 0.4, 0.0, 0.3, 0.0, 0.0)
    forecast = forecast_of(impact, (ROW, two, two), (), True, Visit(1, 0, 1))
    assert forecast.bring == (3, 5, 1, 4)


def test_nothing_of_a_closed_request_is_kept() -> None:
    predictor = Impact(SHAPE)
    empty = {name: str(value) for name, value in vars(predictor).items()}
    for request in range(5):
        fire(predictor, 0, 5, request=request)
        forecast_of(predictor, (ROW,), (), visit=Visit(request, 9, 1))
        predictor.on_request_closed(request)
    assert {name: str(value) for name, value in vars(predictor).items()} == empty


def test_mrs_by_hand() -> None:
    """alpha 0.05, top-1 and so the two highest of four count: S starts at 1/4 each."""
    policy = RecentScore(ModelShape((2, 4), 4, 1))
    first, second = ([ExpertId(layer, number) for number in range(4)] for layer in (2, 4))
    policy.on_gate_fired(Visit(0, 0, 2), {}, ((0.4, 0.3, 0.2, 0.1),), False)
    assert [policy.worth(e) for e in first] == pytest.approx([0.2575, 0.2525, 0.2375, 0.2375])
    policy.on_gate_fired(Visit(0, 0, 2), {}, ((0.1, 0.3, 0.0, 0.6), (0.5, 0.3, 0.1, 0.1)), True)
    # means of the cut rows: 0.25, 0.3, 0, 0.3
    assert [policy.worth(e) for e in first] == pytest.approx([0.257125, 0.254875, 0.225625, 0.240625])
    assert [policy.worth(e) for e in second] == [0.25] * 4
    assert policy.victim(0, first[0], [first[3], second[0], first[0]]) == first[3]


@given(st.lists(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=4), max_size=5))
def test_the_running_score_is_that_of_its_definition(seen: list[list[list[int]]]) -> None:
    """S <- 0.05 TopP(s) + 0.95 S, over the rows' mean shares; ties at the cut, and rows without scores, among them."""
    shape = ModelShape((0,), 6, 1)
    policy, value = RecentScore(shape), [1 / 6] * 6
    for rows in seen:
        policy.on_gate_fired(Visit(0, 0, 0), {}, tuple(tuple(map(float, row)) for row in rows), True)
        kept = []
        for row in rows:
            shares = [score / sum(row) if sum(row) else 0.0 for score in row]
            best = sorted(range(6), key=lambda e, shares=shares: (-shares[e], e))[: policy.top]
            kept.append([shares[e] if e in best else 0.0 for e in range(6)])
        means = [sum(column) / len(rows) for column in zip(*kept, strict=True)]
        value = [0.05 * new + 0.95 * old for new, old in zip(means, value, strict=True)]
    assert [policy.worth(ExpertId(0, e)) for e in range(6)] == pytest.approx(value)

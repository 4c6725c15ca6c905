"""Splits, against exhaustive search over all of them and against cases worked by hand."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies.placement import (
    Balance,
    Costs,
    DeviceOnly,
    HostOnly,
    Hybrid,
    PrefillPipeline,
    ResidentOnly,
    best_loads,
    two_pointers,
)

DEAR = Costs(load_s=10, device_call_s=1, device_row_s=0, host_call_s=0, host_row_s=3)
SECONDS = st.integers(0, 40)
ROWS = st.dictionaries(st.integers(0, 30), st.integers(1, 12), max_size=7)
COSTS = st.builds(Costs, SECONDS, SECONDS, st.integers(0, 5), SECONDS, st.integers(0, 20))


def ends(missing: dict[int, int], resident: dict[int, int], host: set[int], costs: Costs) -> tuple[float, float]:
    """When device and host are done: resident ones first, then each load as it arrives, the most rows first."""
    device = sum(costs.device_s(n) for e, n in resident.items() if e not in host)
    loads = sorted((e for e in missing if e not in host), key=lambda e: (-missing[e], e))
    for place, expert in enumerate(loads):
        device = max(device, (place + 1) * costs.load_s) + costs.device_s(missing[expert])
    return device, sum(costs.host_s({**missing, **resident}[e]) for e in host)


def every(missing: dict[int, int]) -> list[set[int]]:
    return [{e for e, on in zip(missing, bits, strict=True) if on} for bits in product((0, 1), repeat=len(missing))]


def unbalanced(missing: dict[int, int], host: set[int], costs: Costs) -> float:
    """What Algorithm 2 is to make small: max(T_load, T_CPU)."""
    return max((len(missing) - len(host)) * costs.load_s, sum(costs.host_s(missing[e]) for e in host))


def test_algorithm_2_by_hand() -> None:
    """Loads of 10 s, 3 s a row on the host, rows 4, 3, 2, 1. The first is loaded; as 10 > 0, the host takes 1 row
    (3 s), then 2 rows (9 s), and, as 10 > 9, the 3 rows."""
    assert Balance().host({7: 1, 5: 4, 6: 3, 8: 2}, {}, DEAR, False) == {7, 8, 6}
    assert two_pointers([12, 9, 6, 3], 10) == 1
    assert two_pointers([12, 9, 6, 3], 4) == 2  # load 4, host 3, 4 > 3: host 9, 4 <= 9: load 8
    assert two_pointers([5, 5], 5) == 1  # 5 = 5 does not come up: the second pointer has passed the first
    assert two_pointers([5, 5, 5], 5) == 2  # 5 <= 5: the last is loaded
    assert two_pointers([], 5) == 0


def test_a_lone_expert_is_loaded_however_slowly_as_printed() -> None:
    assert not Balance().host({3: 1}, {}, DEAR, False)
    assert Balance(best=True).host({3: 1}, {}, DEAR, False) == {3}


def test_the_balancer_leaves_prefill_to_the_device_and_resident_experts_where_they_are() -> None:
    assert not Balance().host({1: 60, 2: 1, 3: 1}, {}, DEAR, True)
    assert Balance().host({1: 2, 2: 1}, {4: 1, 5: 1}, DEAR, False) == {2}


@settings(max_examples=120)
@given(ROWS, COSTS)
def test_algorithm_2_is_that_near_to_the_best_of_all_splits(missing: dict[int, int], costs: Costs) -> None:
    """The bound of Balance's docstring. Let p be loaded here, q < p in the best split (which loads the first q), and
    loading be the longer part: the last load was begun with (p - 1) l <= host, and the best split's host has that and
    the p-th, c: so the best is at least p l - l + c. Let q > p and the host be the longer part: its last, of c, came
    to it while the host had less than p l <= q l - l, at most the best less l."""
    host = set(Balance().host(missing, {}, costs, False))
    best = min(unbalanced(missing, split, costs) for split in every(missing))
    loaded = [costs.host_s(missing[e]) for e in missing if e not in host]
    hosted = [costs.host_s(missing[e]) for e in host]
    gap = unbalanced(missing, host, costs) - best
    last_load = costs.load_s - min(loaded, default=costs.load_s)
    last_hosted = max(hosted, default=costs.load_s) - costs.load_s
    assert 0 <= gap <= max(last_load, last_hosted, 0)
    assert min(loaded, default=1 << 30) >= max(hosted, default=0)


@settings(max_examples=120)
@given(ROWS, COSTS)
def test_the_best_split_is_the_best_of_all(missing: dict[int, int], costs: Costs) -> None:
    host = set(Balance(best=True).host(missing, {}, costs, False))
    assert unbalanced(missing, host, costs) == min(unbalanced(missing, split, costs) for split in every(missing))


def test_of_equally_good_splits_the_one_with_the_fewest_loads() -> None:
    assert best_loads([6, 2, 2], 6) == 1
    assert best_loads([3, 3], 6) == 0


@given(ROWS, ROWS, COSTS)
def test_smoe_loads_in_prefill_what_the_host_would_take_longer_for(
    missing: dict[int, int], resident: dict[int, int], costs: Costs
) -> None:
    host = set(PrefillPipeline().host(missing, resident, costs, True))
    for expert, rows in missing.items():
        on_host = costs.host_call_s + rows * costs.host_row_s
        on_device = costs.device_call_s + rows * costs.device_row_s + costs.load_s
        assert (expert not in host) == (on_host > on_device)
    assert host <= set(missing)
    assert set(PrefillPipeline().host(missing, resident, costs, False)) == set(missing)


def test_the_simple_ones() -> None:
    missing, resident = {1: 2, 2: 1}, {3: 4}
    for prefill in (False, True):
        assert not set(DeviceOnly().host(missing, resident, DEAR, prefill))
        assert set(ResidentOnly().host(missing, resident, DEAR, prefill)) == {1, 2}
        assert set(HostOnly().host(missing, resident, DEAR, prefill)) == {1, 2, 3}


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

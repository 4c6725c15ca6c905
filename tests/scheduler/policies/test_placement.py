"""Splits, against exhaustive search over all of them and against cases worked by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from hypothesis import given, settings

from scheduler.policies.placement import (
    Balance,
    Costs,
    DeviceOnly,
    HostOnly,
    PrefillPipeline,
    PrintedBalance,
    ResidentOnly,
)
from support.scheduling.splits import COSTS, DEAR, ROWS


def every(missing: dict[int, int]) -> list[set[int]]:
    return [{e for e, on in zip(missing, bits, strict=True) if on} for bits in product((0, 1), repeat=len(missing))]


def unbalanced(missing: dict[int, int], host: set[int], costs: Costs) -> float:
    """What importance's balancer is to make small: max(T_load, T_CPU)."""
    return max((len(missing) - len(host)) * costs.load_s, sum(costs.host_s(missing[e]) for e in host))


def test_the_printed_algorithm_2_by_hand() -> None:
    """Loads of 10 s, 3 s a row on the host, rows 4, 3, 2, 1. The first is loaded; as 10 > 0, the host takes 1 row
    (3 s), then 2 rows (9 s), and, as 10 > 9, the 3 rows. A lone expert is loaded however slowly."""
    assert PrintedBalance().host({7: 1, 5: 4, 6: 3, 8: 2}, {}, DEAR, False) == {7, 8, 6}
    assert not PrintedBalance().host({3: 1}, {}, DEAR, False)
    assert not PrintedBalance().host({}, {}, DEAR, False)
    one_row = replace(DEAR, load_s=3)
    assert PrintedBalance().host({1: 1, 2: 1}, {}, one_row, False) == {2}  # 3 = 3 does not come up: the pointers met
    assert PrintedBalance().host({1: 1, 2: 1, 3: 1}, {}, one_row, False) == {3}  # 3 <= 3: the last is loaded


def test_the_balancer_leaves_prefill_to_the_device_and_resident_experts_where_they_are() -> None:
    assert not Balance().host({1: 60, 2: 1, 3: 1}, {}, DEAR, True)
    assert Balance().host({1: 4, 2: 1}, {4: 1, 5: 1}, DEAR, False) == {2}
    assert Balance().host({3: 1}, {}, DEAR, False) == {3}  # 3 s on the host, 10 s to load


@settings(max_examples=120)
@given(ROWS, COSTS)
def test_the_balancer_finds_the_best_of_all_splits(missing: dict[int, int], costs: Costs) -> None:
    host = set(Balance().host(missing, {}, costs, False))
    best = min(unbalanced(missing, split, costs) for split in every(missing))
    assert unbalanced(missing, host, costs) == best
    equal = [len(missing) - len(split) for split in every(missing) if unbalanced(missing, split, costs) == best]
    assert len(missing) - len(host) == min(equal)


@settings(max_examples=120)
@given(ROWS, COSTS)
def test_the_printed_algorithm_2_is_that_near_to_the_best_of_all_splits(missing: dict[int, int], costs: Costs) -> None:
    """The bound of PrintedBalance's docstring. Let p be loaded here, q < p in the best split (which loads the first q),
    and loading be the longer part: the last load was begun with (p - 1) l <= host, and the best split's host has that
    and the p-th, c: so the best is at least p l - l + c. Let q > p and the host be the longer part: its last, of c,
    came to it while the host had less than p l <= q l - l, at most the best less l."""
    host = set(PrintedBalance().host(missing, {}, costs, False))
    best = min(unbalanced(missing, split, costs) for split in every(missing))
    loaded = [costs.host_s(missing[e]) for e in missing if e not in host]
    hosted = [costs.host_s(missing[e]) for e in host]
    gap = unbalanced(missing, host, costs) - best
    last_load = costs.load_s - min(loaded, default=costs.load_s)
    last_hosted = max(hosted, default=costs.load_s) - costs.load_s
    assert 0 <= gap <= max(last_load, last_hosted, 0)
    assert min(loaded, default=1 << 30) >= max(hosted, default=0)


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

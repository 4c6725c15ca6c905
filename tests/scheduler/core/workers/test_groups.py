"""Groups in round robin: the paper's fixed groups where they exist, an even share in any case."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.groups import ALIKE, LEAST_S, PLACES, RoundRobin, weighted_ring
from scheduler.errors import ConfigError

WORKERS = st.lists(st.integers(0, 40), min_size=1, max_size=14, unique=True).map(sorted)


def test_the_papers_testbed() -> None:
    """Eight workers, groups of two: devices 1 and 2, 3 and 4, 5 and 6, 7 and 8, and again."""
    groups = [RoundRobin(2).group(range(1, 9), turn) for turn in range(9)]
    assert groups == [[1, 2], [3, 4], [5, 6], [7, 8], [1, 2], [3, 4], [5, 6], [7, 8], [1, 2]]


def test_groups_that_do_not_divide_wrap_around() -> None:
    groups = [RoundRobin(2).group([3, 5, 9], turn) for turn in range(4)]
    assert groups == [[3, 5], [9, 3], [5, 9], [3, 5]]


def test_a_group_larger_than_the_cluster_is_the_whole_cluster() -> None:
    assert [RoundRobin(4).group([1, 2, 7], turn) for turn in range(3)] == [[1, 2, 7]] * 3


@given(size=st.integers(1, 6), groups=st.integers(1, 6), turn=st.integers(0, 10_000))
def test_where_the_size_divides_the_groups_are_fixed(size: int, groups: int, turn: int) -> None:
    fixed = [[g * size + i for i in range(size)] for g in range(groups)]
    assert RoundRobin(size).group(range(size * groups), turn) == fixed[turn % groups]


@given(WORKERS, st.integers(1, 8), st.integers(0, 5_000))
def test_over_any_window_of_as_many_turns_as_workers_all_serve_equally_often(
    workers: list[int], size: int, start: int
) -> None:
    count = Counter(w for turn in range(start, start + len(workers)) for w in RoundRobin(size).group(workers, turn))
    assert set(count) == set(workers)
    assert set(count.values()) == {min(size, len(workers))}


@given(WORKERS, st.integers(1, 8), st.integers(0, 5_000))
def test_a_worker_is_called_again_only_after_all_others(workers: list[int], size: int, start: int) -> None:
    """So nobody has less time to load than a round of the ring, rounded down to whole groups, leaves."""
    called = [w for turn in range(start, start + 20) for w in RoundRobin(size).group(workers, turn)]
    for i in range(len(called) - len(workers) + 1):
        assert set(called[i : i + len(workers)]) == set(workers)


@given(WORKERS, st.integers(1, 8), st.integers(0, 5_000))
def test_a_ring_holds_everybody_once_and_begins_with_the_group(workers: list[int], size: int, turn: int) -> None:
    placement = RoundRobin(size)
    ring, group = list(placement.ring(workers, turn)), placement.group(workers, turn)
    assert sorted(ring) == workers
    assert ring[: len(group)] == group
    assert len(group) == min(size, len(workers))


@given(WORKERS, st.integers(1, 8), st.integers(1, 20), st.integers(1, 12))
def test_prefill_spreads_experts_evenly(workers: list[int], size: int, experts: int, layers: int) -> None:
    """Over any number of whole layers nobody has more than one expert above another."""
    shares = [RoundRobin(size).share(workers, ordinal, experts) for ordinal in range(layers)]
    assert all(len(share) == experts for share in shares)
    for first in range(layers):
        count = Counter(dict.fromkeys(workers, 0))
        for share in shares[first:]:
            count.update(share)
            assert max(count.values()) - min(count.values()) <= 1


def test_prefill_on_the_papers_testbed_is_one_expert_a_worker() -> None:
    assert [RoundRobin(2).share(range(8), ordinal, 8) for ordinal in range(3)] == [list(range(8))] * 3


@pytest.mark.parametrize("size", [0, -1])
def test_a_group_needs_somebody(size: int) -> None:
    with pytest.raises(ConfigError, match=f"group-size is {size}; allowed: 1"):
        RoundRobin(size)


# --- uneven workers ---------------------------------------------------------------------------------------------------

COSTS = st.dictionaries(st.integers(0, 40), st.floats(0.01, 1.0), min_size=1, max_size=12)


@given(WORKERS, st.floats(0.01, 1.0), st.data())
def test_workers_that_measure_alike_take_turns_as_in_the_paper(
    workers: list[int], cost: float, data: st.DataObject
) -> None:
    noise = st.floats(1.0, 1.1)
    assert weighted_ring({worker: cost * data.draw(noise) for worker in workers}) == tuple(workers)


def test_differences_that_are_shorter_than_a_measurement_do_not_count() -> None:
    assert weighted_ring({0: 0.0003, 1: 0.0003 + LEAST_S, 2: 0.0002}) == (0, 1, 2)


def test_half_the_speed_is_half_the_turns() -> None:
    ring = weighted_ring({**dict.fromkeys(range(7), 0.01), 7: 0.02})
    turns = Counter(ring)
    assert {turns[worker] for worker in range(7)} == {2 * turns[7]}


def test_a_worker_that_is_not_known_counts_as_the_median() -> None:
    assert weighted_ring({0: 0.0, 1: 0.0}) == (0, 1)
    turns = Counter(weighted_ring({0: 0.0, 1: 0.01, 2: 0.01, 3: 0.02}))
    assert turns[0] == turns[1] == turns[2] == 2 * turns[3]


@given(COSTS)
def test_turns_go_by_speed_and_nobody_is_left_out(costs: dict[int, float]) -> None:
    """Within the quarter to which speeds are rounded, and the bounds at both ends."""
    turns, median = Counter(weighted_ring(costs)), statistics.median(costs.values())
    assert set(turns) == set(costs)
    if set(turns.values()) == {1}:
        return
    for worker, cost in costs.items():
        speed = min(max(1 / PLACES, median / cost), PLACES)
        assert abs(turns[worker] / PLACES - speed) <= 1 / 8 or 1 / ALIKE <= speed <= ALIKE


@given(COSTS)
def test_a_worker_s_turns_are_spread_over_the_ring(costs: dict[int, float]) -> None:
    """Between two turns of a worker lie at most twice as many as there would be if they were equally far apart."""
    ring = weighted_ring(costs)
    for worker, count in Counter(ring).items():
        places = [place for place, one in enumerate(ring) if one == worker]
        gaps = [after - before for before, after in zip(places, [*places[1:], places[0] + len(ring)], strict=True)]
        assert max(gaps) <= 2 * len(ring) / count


@given(COSTS, st.integers(1, 8), st.integers(0, 5_000))
def test_a_group_of_uneven_workers_has_each_of_them_once(costs: dict[int, float], size: int, turn: int) -> None:
    placement, ring = RoundRobin(size), weighted_ring(costs)
    assert sorted(placement.ring(ring, turn)) == sorted(costs)
    assert len({*placement.group(ring, turn)}) == min(size, len(costs))

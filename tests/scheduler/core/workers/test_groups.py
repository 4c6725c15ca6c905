"""Groups in round robin: the paper's fixed groups where they exist, an even share in any case."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.groups import RoundRobin
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

"""Equation (1) against the pipeline of figure 2, played through step by step."""

from __future__ import annotations

import pytest

from scheduler.core.groups import RoundRobin
from scheduler.errors import ConfigError
from scheduler.timing.load_budget import load_budget


def first_stall(workers: int, group: int, main: int, worker: int, load: int, layers: int = 60) -> int | None:
    """The first layer whose computation waits for a load, all predictions right and early. Every worker begins with
    its first expert loaded, as it does once the pipeline runs."""
    ready = dict.fromkeys(range(workers), 0)
    now = 0
    for layer in range(layers):
        now += main  # attention and gate of this layer
        serving = RoundRobin(group).group(range(workers), layer)
        if any(ready[w] > now for w in serving):
            return layer
        now += worker
        for w in serving:  # computed, evicted: the next load begins
            ready[w] = now + load
    return None


@pytest.mark.parametrize(
    ("workers", "group"), [(8, 2), (8, 1), (8, 4), (8, 8), (2, 1), (3, 1), (6, 2), (12, 3), (1, 1)]
)
@pytest.mark.parametrize(("main", "worker"), [(5, 3), (1, 0), (0, 4), (7, 7), (2, 11)])
def test_a_load_may_take_exactly_as_long_as_equation_1_says(workers: int, group: int, main: int, worker: int) -> None:
    allowed = load_budget(workers, group, main, worker, 0).max_load_s
    assert allowed == int(allowed)
    assert first_stall(workers, group, main, worker, int(allowed)) is None
    # The first load that is waited for is group 1's second one.
    assert first_stall(workers, group, main, worker, int(allowed) + 1) == workers // group


@pytest.mark.parametrize(("workers", "group"), [(5, 2), (3, 2), (7, 3), (5, 3), (12, 5), (9, 4)])
@pytest.mark.parametrize(("main", "worker"), [(5, 3), (1, 0), (0, 4), (7, 7), (2, 11)])
def test_groups_that_wrap_around_have_as_long_as_the_shortest_way_round(
    workers: int, group: int, main: int, worker: int
) -> None:
    allowed = load_budget(workers, group, main, worker, 0).max_load_s
    assert first_stall(workers, group, main, worker, int(allowed)) is None
    assert first_stall(workers, group, main, worker, int(allowed) + 1) is not None


def test_the_papers_example_by_hand() -> None:
    """Four groups: four main-node tasks and three expert computations pass before a group is called again."""
    budget = load_budget(workers=8, group_size=2, main_s=0.005, worker_s=0.002, load_s=0.020)
    assert budget.groups == 4
    assert budget.max_load_s == pytest.approx(4 * 0.005 + 3 * 0.002)
    assert budget.slack_s == pytest.approx(0.006)
    assert not budget.io_bound


@pytest.mark.parametrize(("load", "bound"), [(25, False), (26, False), (27, True), (0, False)])
def test_io_bound_begins_where_the_budget_ends(load: int, bound: bool) -> None:
    budget = load_budget(8, 2, 5, 2, load)
    assert (budget.max_load_s, budget.slack_s, budget.io_bound) == (26, 26 - load, bound)
    assert (first_stall(8, 2, 5, 2, load) is not None) == bound


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((8, 0, 1, 1, 1), "group-size is 0 with 8 workers; allowed: 1 to 8"),
        ((2, 3, 1, 1, 1), "group-size is 3 with 2 workers; allowed: 1 to 2"),
        ((8, 2, -1, 1, 1), "main_s is -1"),
        ((8, 2, 1, -1, 1), "worker_s is -1"),
        ((8, 2, 1, 1, -1), "load_s is -1"),
    ],
)
def test_numbers_that_cannot_be_are_refused(numbers: tuple[int, int, float, float, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_budget(*numbers)

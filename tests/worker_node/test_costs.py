"""Costs of computing, on a clock that the computations move."""

from __future__ import annotations

import pytest

from worker_node.costs import ROUNDS, ROWS, SECONDS, computing_costs


class Machine:
    """Each expert takes its own time for a call and a row; the first call of each takes so much more."""

    def __init__(self, call_s: float, row_s: float, cold_s: float = 0.0) -> None:
        self.now = 0.0
        self.called: list[tuple[int, int]] = []
        self._times = call_s, row_s, cold_s

    def expert(self, number: int, rows: int) -> None:
        call_s, row_s, cold_s = self._times
        first = number not in (before for before, _ in self.called)
        self.called.append((number, rows))
        self.now += call_s + rows * row_s + first * cold_s

    def costs(self, experts: int) -> tuple[float, float]:
        return computing_costs([lambda rows, n=n: self.expert(n, rows) for n in range(experts)], lambda: self.now)


@pytest.mark.parametrize(("call_s", "row_s"), [(1e-3, 2e-4), (0.0, 5e-4), (3e-3, 0.0)])
def test_a_line_through_what_it_takes(call_s: float, row_s: float) -> None:
    machine = Machine(call_s, row_s, cold_s=7.0)
    assert machine.costs(4) == (pytest.approx(call_s), pytest.approx(row_s)), "cold ones do not count"


def test_it_ends() -> None:
    machine = Machine(1e-6, 1e-6)
    machine.costs(3)
    assert len(machine.called) == 3 + ROUNDS * 3 * 2
    slow = Machine(10 * SECONDS, 0.0)
    assert slow.costs(3) == (pytest.approx(10 * SECONDS), 0.0)
    assert slow.called == [(0, 1), (1, 1), (2, 1), (0, 1), (0, ROWS)]


def test_more_rows_that_take_less_are_no_gain() -> None:
    """Another kernel, or luck: never a negative time."""
    now = 0.0

    def expert(rows: int) -> None:
        nonlocal now
        now += 2e-3 if rows == 1 else 1e-3

    assert computing_costs([expert], lambda: now) == (pytest.approx(2e-3), 0.0)

"""What rows cost, from steps of known cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.drafts.cost import StepCost


def learnt(seconds, rows=(1, 2, 1, 4, 16, 1, 8, 3), times=60):
    cost = StepCost(8, 2)
    for _ in range(times):
        for count in rows:
            cost.on_step_ended(count, seconds(cost, count))
    return cost


@given(st.floats(0.1, 1), st.floats(0.0, 0.5), st.floats(0.0, 0.5))
def test_the_cost_of_experts_and_of_rows_is_found(step_s, expert_s, row_s):
    def seconds(cost, rows):
        return step_s + expert_s * cost.experts(rows) + row_s * rows

    cost = learnt(seconds)
    for rows in (2, 4, 8, 16):
        assert cost.seconds(rows) == pytest.approx(seconds(cost, rows), rel=0.3)


def test_the_union_of_a_row_is_its_own_experts_and_never_more_than_all():
    cost = StepCost(8, 2)
    assert cost.experts(1) == pytest.approx(2)
    assert cost.experts(2) == pytest.approx(3.5)
    assert cost.experts(1000) == pytest.approx(8)


def test_before_rows_were_measured_longer_blocks_promise_to_pay():
    cost = StepCost(8, 2)
    assert not cost.is_known
    for _ in range(5):
        cost.on_step_ended(1, 0.25)
    assert cost.seconds(1) == pytest.approx(0.25)
    assert cost.seconds(16) < 4 * cost.seconds(1)


def test_steps_of_one_row_do_not_make_it_forget_what_rows_cost():
    cost = learnt(lambda cost, rows: 0.2 + 0.05 * rows)
    before = cost.seconds(16) - cost.seconds(1)
    for seconds in (0.25, 0.35):
        for _ in range(100):
            cost.on_step_ended(1, seconds)
    assert cost.seconds(1) == pytest.approx(0.35, rel=0.01)
    assert cost.seconds(16) - cost.seconds(1) == pytest.approx(before, rel=0.2)


def test_no_row_costs_less_than_nothing_nor_more_than_its_share_of_a_step():
    free = learnt(lambda cost, rows: 9.0 if rows == 1 else 0.1)
    assert free.seconds(16) == pytest.approx(free.seconds(1))
    dear = learnt(lambda cost, rows: 0.1 if rows == 1 else 9.0)
    assert all(dear.seconds(rows) > 0 for rows in range(1, 17))

"""In which step a row is expected."""

from __future__ import annotations

import pytest

from scheduler.core.state import Request
from scheduler.core.stats import RequestStats


@pytest.mark.parametrize(
    ("position", "rows", "block", "expected"),
    [
        (10, 1, 1, [8, 9, 10, 11]),
        (0, 11, 1, [8, 9, 10, 11]),  # a prompt: rows after it come one by one
        (8, 3, 3, [8, 8, 8, 9]),
        (7, 4, 4, [8, 8, 8, 8, 9]),
    ],
)
def test_rows_after_a_pass_come_in_steps_of_so_many(position: int, rows: int, block: int, expected: list[int]) -> None:
    number = 7
    request = Request(RequestStats(5), reached=(position, -1), rows=rows, block=block)
    request.lead = number - (position + rows - 1)
    assert [request.step_of(11 + ahead) for ahead in range(len(expected))] == expected

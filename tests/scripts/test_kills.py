"""The table of killed nodes says what became of each answer."""

from __future__ import annotations

from scripts.lib.tables import text_table
from scripts.testbed.kills import COLUMNS


def test_outcomes() -> None:
    times = ("longest_gap_s", "longest_gap_calm_s", "median_gap_calm_s", "answer_s", "answer_calm_s", "back_and_used_s")
    killed = {"killed": "worker 1", "after_token": 3, "tokens_equal": True, "error": None, **dict.fromkeys(times, 0.25)}
    table = text_table(
        COLUMNS, [killed, killed | {"tokens_equal": False}, killed | {"error": "RequestFailedError: no worker"}]
    )
    for line, said in zip(
        table.splitlines()[1:], ("tokens equal", "TOKENS DIFFER", "RequestFailedError: no worker"), strict=True
    ):
        assert f"  {said}  " in line

"""The steps of importance-driven scheduling: a small whole run."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.papers import ablation_importance


@pytest.mark.slow
def test_steps_of_importance(run: Any) -> None:
    found, _ = run(ablation_importance, "--how", "disk", "--budgets", "50", "--tokens", "4")
    rows = {row["step"]: row for row in found["rows"]}
    assert list(rows) == ["+loads", "+CE", "+ER", "+Pre"]
    assert [row["exact"] for row in rows.values()] == [True, True, False, False]
    assert rows["+ER"]["recall"] is None
    assert 0 < rows["+Pre"]["recall"] <= 1
    assert rows["+loads"]["tpot_ratio"] is None
    assert rows["+CE"]["tpot_ratio"] == pytest.approx(rows["+CE"]["tpot_s"] / rows["+loads"]["tpot_s"])

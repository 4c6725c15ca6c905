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


@pytest.mark.slow
def test_steps_of_three_prompts_at_once(run_script: Any) -> None:
    """Beside a host, where the balancer has batch sizes to balance."""
    flags = ["--quick", "--models", "models/demo-moe", "--prompts", "1", "--history", "1", "--tokens", "8"]
    flags += ["--how", "emulated", "--budgets", "25", "--batch", "3"]
    found = run_script(ablation_importance, *flags, name="ablation_importance-batch3-quick")
    rows = {row["step"]: row for row in found.facts["rows"]}
    assert list(rows) == ["baseline", "+loads", "+CE", "+ER", "+Pre", "+BA"]
    assert all(row["tpot_s"] == pytest.approx(3 * row["token_s"]) for row in rows.values())
    assert all(2 < row["requests_per_step"] <= 3 for row in rows.values())
    assert [row["exact"] for row in rows.values()] == [True, True, True, False, False, False]
    assert rows["baseline"]["host_computed"] > 0 == rows["+Pre"]["host_computed"]

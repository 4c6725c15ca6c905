"""OD-MoE's Fig 8, simulated: a whole run."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.papers import ablation


@pytest.mark.slow
def test_a_whole_run(run_script: Any) -> None:
    flags = ["--quick", "--model", "models/demo-moe", "--prompts", "1", "--tokens", "8", "--how", "simulated"]
    found = run_script(ablation, *flags, name="ablation-quick")
    rows = {row["case"]: row for row in found.facts["rows"]}
    assert sorted(rows) == [1, 2, 3, 4, 5, 6]
    speed = {case: row["decode_tokens_per_s"] for case, row in rows.items()}
    assert speed[1] > max(speed[5], speed[6]), "without a shadow"
    assert rows[1]["recall"] >= rows[4]["recall"] > 0, "aligned in neither"

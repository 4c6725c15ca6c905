"""OD-MoE's Figs 9 and 10: a whole run."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.papers import sweep_alignment


@pytest.mark.slow
def test_a_whole_run(run_script: Any) -> None:
    flags = ["--quick", "--model", "models/demo-moe", "--tokens", "12", "--periods", "1", "4"]
    found = run_script(sweep_alignment, *flags, name="sweep_alignment-quick")
    rows = {(row["profile"], row["token_period"], row["kv_period"]): row for row in found.facts["rows"]}
    assert set(rows) == {(name, token, kv) for name in sweep_alignment.PAPER for token in (1, 4) for kv in (1, 4)}
    for name in sweep_alignment.PAPER:
        assert rows[name, 1, 1]["recall"] >= rows[name, 4, 4]["recall"] > 0
        best = found.facts["best"][name]
        assert rows[(name, *best)]["decode_tokens_per_s"] == max(
            row["decode_tokens_per_s"] for (of, *_), row in rows.items() if of == name
        )

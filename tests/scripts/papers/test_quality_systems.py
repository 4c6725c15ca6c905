"""What approximate systems cost: a small whole run, and how sure a finding is."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.papers import quality_systems


@pytest.mark.slow
def test_what_approximation_costs(run: Any) -> None:
    flags = ["--alphas", "0", "1", "--forms", "full", "int2", "--problems", "1", "--tokens", "4", "--text-tokens", "20"]
    found, _ = run(quality_systems, *flags, "--window", "10")
    rows = {row["variant"]: row for row in found["rows"]}
    for name in ("alpha 0", "form full"):
        assert rows[name]["same_tokens"] == 4
        assert rows[name]["perplexity_ratio"] == pytest.approx(1, abs=1e-4)
    assert rows["form full"]["exact"]
    for name in ("alpha 1", "form int2"):
        assert not rows[name]["exact"]
    # How much alpha costs depends on what is resident, so on time: over ten tokens it may be next to nothing.
    assert rows["alpha 1"]["perplexity_ratio"] != 1
    assert abs(rows["form int2"]["perplexity_ratio"] - 1) > 1e-3


@pytest.mark.parametrize(
    ("ratio", "error", "words"),
    [
        (1.004, 0.003, "costs at most 1% of perplexity: +0.40% +- 0.30% at 0.3"),
        (1.004, 0.03, "costs at most 1% of perplexity: +0.40% +- 3.00% at 0.3; too few tokens to be sure"),
        (1.04, 0.01, "costs more than 1% of perplexity: +4.00% +- 1.00% at 0.3"),
        (1.04, 0.05, "costs more than 1% of perplexity: +4.00% +- 5.00% at 0.3; too few tokens to be sure"),
    ],
)
def test_a_finding_says_how_sure_it_is(ratio: float, error: float, words: str) -> None:
    rows = [
        {"model": "m", "variant": f"alpha {alpha}", "perplexity_ratio": more, "ratio_error": off}
        for alpha, more, off in (("0", 1.0, 0.0), ("0.3", ratio, error), ("0.6", 2.0, 0.1))
    ]
    assert quality_systems.finding(rows) == [f"m: alpha up to 0.3 {words}"]

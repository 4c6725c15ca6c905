"""Time to first token over mini-batches: a whole run."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.papers import sweep_minibatch


@pytest.mark.slow
def test_a_whole_run(run_script: Any) -> None:
    flags = ["--quick", "--model", "models/demo-moe", "--lengths", "16", "64"]
    found = run_script(sweep_minibatch, *flags, name="sweep_minibatch-quick")
    times = {(row["prompt_tokens"], row["prefill"], row["mini_batch"]): row["ttft_s"] for row in found.facts["rows"]}
    sizes = [sweep_minibatch.named(size) for size in sweep_minibatch.SIZES]
    assert set(times) == {(length, way, size) for length in (16, 64) for way in sweep_minibatch.WAYS for size in sizes}
    for length in (16, 64):
        assert all(times[length, "ahead", size] < times[length, "in-turn", size] for size in sizes)
    assert all(times[64, way, size] >= times[16, way, size] for _, way, size in times)
    assert times[64, "ahead", found.facts["best"]] <= times[64, "ahead", "1"]

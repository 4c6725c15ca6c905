"""Accuracy of predictors: what must hold whatever a model does, and counting against counting by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scheduler.types import ModelShape
from scripts.papers import prediction, prediction_count


@pytest.mark.slow
def test_one_short_run(run_script: Any, tmp_path: Path) -> None:
    flags = ["--model", "models/demo-moe", "--quick", "--prompts", "1", "--tokens", "5"]
    rows = run_script(prediction, *flags, name="prediction-demo-moe-quick").table
    value = {(row["kind"], row["layer"]): float(row["value"]) for row in rows}
    layers = [str(n) for n in range(8)]
    assert all(value["next-layer, 100 % resident", n] == 1 for n in layers[1:]), "all experts given: no prediction"
    for n in layers[1:]:
        assert value["position 2 decode rows", n] == value["next-gate", n] == value["stacked, 1 ahead", n]
    assert value["iteration-wise", "1"] == value["next-gate", "1"], "of the second layer both ask the same"
    assert value["next-layer, 0 % resident", "all"] < 1
    assert all(0 <= one <= 1 for one in value.values())
    assert (tmp_path / "prediction-demo-moe-quick.png").stat().st_size > 20_000


def test_counts_add_up() -> None:
    one, other = prediction_count.Counts(), prediction_count.Counts()
    one.add("a", 0, 1, 2, 2)
    one.add("a", 0, 2, 2, 3)
    other.add("a", 0, 0, 2, 4)
    other.add("a", 1, 2, 2, 2)
    other.mean("b", 1, 0.5, 4)
    both = prediction_count.Counts.of([one.plain(), other.plain()])
    assert both.layer("a", 0) == pytest.approx(3 / 6)
    assert both.layer("a", 1) == 1
    assert both.layer("a", 2) is None
    assert both.overall("a") == pytest.approx(5 / 8)
    assert both.overall("b") == pytest.approx(0.5)
    assert both.rows([0, 1, 2])[:2] == [
        {"kind": "a", "layer": "all", "value": 5 / 8, "expected": 11 / 4},
        {"kind": "a", "layer": 0, "value": 3 / 6, "expected": 3},
    ]


def test_a_path_that_never_changes_is_soon_foretold() -> None:
    """Ten answers that each go the same way: once seen, the path is always right, and chance stays chance."""
    shape = ModelShape((0, 1), 4, 2)
    passes = [{"position": 0, "tokens": 3, "experts": [[[0, 1]] * 3, [[2, 3]] * 3]}]
    passes += [{"position": 3 + n, "tokens": 1, "experts": [[[0, 1]], [[2, 3]]]} for n in range(50)]
    counts = prediction_count.Counts.of(prediction_count.replayed(shape, [passes] * 10))
    assert counts.layer("path", 1) == 1
    assert counts.layer("traces", 1) == 1
    assert counts.overall("random") == pytest.approx(0.5, abs=0.05)

"""Recall after a shift of domain: counted by hand, and steps that are the engine's own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.gates import Gates
from checkpoint.prediction.token_predictor import TokenPredictor
from main_node.engine.foresight import TokenForesight
from odmoe.training.observed_model import Rows
from scheduler.types import ModelShape, Visit
from scripts.papers.predictors import shift


class Chosen(Gates):
    """Of a gate whose last scores are given."""

    def __init__(self) -> None:
        self.now = torch.zeros(0)

    def ranked(self, layer: int, outputs: Any = None) -> torch.Tensor:
        return self.now


@pytest.fixture
def rows() -> Rows:
    """One layer of five experts, top-2: a prompt of three rows and six decoded ones."""
    torch.manual_seed(1)
    scores = torch.rand(9, 5).softmax(-1)
    return Rows(3, {4: torch.randn(9, 6)}, {4: scores.topk(2).indices}, {4: scores})


def test_recall_is_that_counted_by_hand(rows: Rows) -> None:
    weights = {4: torch.randn(5, 6)}
    by_hand, same = [], []
    for n in range(3, 9):
        chosen = set(rows.index[4][n].tolist())
        by_hand.append(len(chosen & set((weights[4] @ rows.inputs[4][n - 1]).topk(2).indices.tolist())) / 2)
        same.append(len(chosen & set(rows.index[4][n - 1].tolist())) / 2)
    assert shift.recall(rows, weights) == by_hand == shift.online(rows, weights, 0.0)
    assert shift.recall(rows, None) == same


def test_steps_are_those_that_the_main_node_takes(rows: Rows) -> None:
    weights, gates = {4: torch.randn(5, 6)}, Chosen()
    foresight = TokenForesight(TokenPredictor({4: weights[4].clone()}), gates, ModelShape((4,), 5, 2), 3.0)
    expected: list[float] = []
    said: set[int] = set()
    for first, last in [(0, 3), *((n, n + 1) for n in range(3, 9))]:
        gates.now = rows.scores[4][first:last]
        if first:
            expected.append(len(said & set(rows.index[4][first].tolist())) / 2)
        told = foresight.ahead(Visit(1, first, 4), rows.inputs[4][first:last], lambda: None)
        said = set(torch.tensor(told[0].scores[0]).topk(2).indices.tolist())
    before = weights[4].clone()
    assert shift.online(rows, weights, 3.0) == expected != shift.recall(rows, weights)
    assert torch.equal(weights[4], before), "each answer begins with the predictor as it was trained"


def test_one_short_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = ["--quick", "--prompts", "1", "--tokens", "6", "--models", "models/demo-moe", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(shift.__file__), *flags])
    assert shift.main() == 0
    rows = json.loads((tmp_path / "shift-quick.json").read_text())["rows"]
    assert [row["predictor"] for row in rows][:2] == [shift.SAME, shift.SHIPPED]
    assert len(rows) == 3 + sum(map(len, shift.RATES.values()))
    assert all(0 <= row[domain] <= 1 and row["chance"] == 0.25 for row in rows for domain in shift.DOMAINS)

"""What an expert costs, shared or not, is a row with all that its table shows."""

from __future__ import annotations

import pytest
import torch

from scripts.measure import batch_dense


def test_a_row_of_experts_has_every_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_dense, "EXPERTS_BYTES", 1 << 16)
    monkeypatch.setattr(batch_dense, "TURN_BYTES", 1 << 14)
    monkeypatch.setattr(batch_dense, "PIECE", 1 << 10)
    with torch.inference_mode():
        row = batch_dense.expert_speed(hidden=32, inner=48, dtype="float32", count=2, turns=1)
    assert row["part"] == "experts"
    assert (row["hidden"], row["inner"], row["requests"]) == (32, 48, 2)
    assert "-" not in [column.text(row) for column in batch_dense.TABLES["experts"]]

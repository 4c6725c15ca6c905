"""One product by every kernel is one row, with all that the table shows."""

from __future__ import annotations

import torch

from scripts.measure.kernels import COLUMNS, speeds


def test_a_row_has_every_column() -> None:
    memory = torch.randn(1 << 14).to(torch.bfloat16)
    row = speeds(inputs=64, outputs=32, count=1, memory=memory, turns=1)
    assert "-" not in [column.text(row) for column in COLUMNS]
    assert row["linear: over_linear"] == 1
    assert row["linear: differing"] == 0
    assert row["read: differing"] is None

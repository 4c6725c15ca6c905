"""The comparisons that allow passes of any division: they must find rows that depend on what is beside them."""

from __future__ import annotations

import torch

from checkpoint.fixed_shapes import ROWS_COMPARED, are_rows_alike


def test_rows_that_depend_on_others_are_found() -> None:
    hidden, weights = torch.randn(ROWS_COMPARED, 8), torch.rand(ROWS_COMPARED)

    def by_themselves(rows: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        return rows * routing[:, None]

    def of_many(rows: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        return rows * routing[:, None] + (1e-6 if len(rows) > 256 else 0.0)

    def last(rows: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        output = rows * routing[:, None]
        output[len(rows) // 16 * 16 :] += 1e-6
        return output

    assert are_rows_alike(by_themselves, hidden, weights)
    assert not are_rows_alike(of_many, hidden, weights)
    assert not are_rows_alike(last, hidden, weights)

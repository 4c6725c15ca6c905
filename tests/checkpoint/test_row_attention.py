"""A single row's attention beside Transformers' own, in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from checkpoint.row_attention import attend

GROUPS: Any = SimpleNamespace(num_key_value_groups=4, is_causal=True)


def drawn(rows: int, length: int = 37) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(length)
    shapes = (1, rows, 8, 64), (1, length, 2, 64), (1, length, 2, 64)
    query, key, value = (torch.randn(shape, generator=draw).bfloat16().transpose(1, 2) for shape in shapes)
    return query, key, value


@pytest.mark.parametrize("length", [1, 37, 512])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_a_row_attends_as_in_float64(length: int, scaling: float | None) -> None:
    query, key, value = drawn(1, length)
    found, _ = attend(GROUPS, query, key, value, None, scaling, dropout=0.0, sliding_window=None)
    wide = (one.double() for one in (query, key, value))
    expected, _ = sdpa_attention_forward(GROUPS, *wide, None, scaling=scaling)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=2**-10)


def test_masks_and_several_rows_are_left_to_torch() -> None:
    mask = torch.rand(1, 1, 1, 37) > 0.5
    for rows, given in ((1, mask), (5, None)):
        query, key, value = drawn(rows)
        found, _ = attend(GROUPS, query, key, value, given)
        expected, _ = sdpa_attention_forward(GROUPS, query, key, value, given)
        assert torch.equal(found, expected)

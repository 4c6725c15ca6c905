"""A single row's attention beside Transformers' own, in float64; alone, and in a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from checkpoint import row_attention
from checkpoint.row_attention import attend, use_row_attention
from support.models.checkpoints import build

GROUPS: Any = SimpleNamespace(num_key_value_groups=4, is_causal=True)


def drawn(rows: int, length: int = 37) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(length)
    shapes = (1, rows, 8, 64), (1, length, 2, 64), (1, length, 2, 64)
    query, key, value = (torch.randn(shape, generator=draw).bfloat16().transpose(1, 2) for shape in shapes)
    return query, key, value


@pytest.mark.parametrize("length", [1, 37, 5000])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_a_row_attends_as_in_float64(length: int, scaling: float | None) -> None:
    query, key, value = drawn(1, length)
    found, _ = attend(GROUPS, query, key, value, None, scaling, dropout=0.0, sliding_window=None)
    hides_nothing = torch.ones(1, 1, 1, length, dtype=torch.bool)
    assert torch.equal(attend(GROUPS, query, key, value, hides_nothing, scaling)[0], found)
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


@pytest.mark.parametrize("window", [None, 8])
def test_a_model_attends_its_single_rows(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """A cache that forgets what the window hides has masks that hide nothing."""
    monkeypatch.setattr(row_attention, "is_faster", lambda: False)
    plain = build("mixtral", sliding_window=window).bfloat16().eval()
    model = build("mixtral", sliding_window=window).bfloat16().eval()
    use_row_attention(model)
    left: list[int] = []

    def watched(module: Any, query: torch.Tensor, *of: Any, **given: Any) -> Any:
        left.append(query.shape[2])
        return sdpa_attention_forward(module, query, *of, **given)

    monkeypatch.setattr("transformers.integrations.sdpa_attention.sdpa_attention_forward", watched)
    found, expected = (generated(one) for one in (model, plain))
    assert set(left) == {12}, "single rows are left to torch"
    assert float((found - expected).norm() / expected.norm()) < 0.02


@torch.inference_mode()
def generated(model: Any) -> torch.Tensor:
    """Logits of five tokens after a prompt of 12."""
    found, cache = [], None
    for tokens in torch.arange(2, 19).split([12, 1, 1, 1, 1, 1]):
        output = model(input_ids=tokens.unsqueeze(0), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits[0, -1])
    return torch.stack(found[1:]).float()

"""A wider checkpoint answers as the narrow one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.lib import widened as widen

SIZES = {
    "mixtral": {"num_local_experts": 4, "intermediate_size": 24},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8},
}


def small(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        **SIZES[kind],
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", SIZES)
def test_a_wider_checkpoint_says_what_it_said(kind: str) -> None:
    model = small(kind)
    wide = widen.widened(model, 5).eval()
    ids = torch.arange(1, 20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(wide(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    experts = [sum(p.numel() for n, p in one.named_parameters() if ".experts." in n) for one in (model, wide)]
    assert experts[1] == 5 * experts[0]
    more = sum(p.numel() for p in wide.parameters()) - sum(p.numel() for p in model.parameters())
    assert more == 4 * experts[0]


def test_a_copy_is_made_once_for_the_same_weights(tmp_path: Path) -> None:
    model = tmp_path / "small"
    narrow = small("mixtral")
    narrow.save_pretrained(model)
    (model / "tokenizer.json").write_text("{}")
    out = widen.widened_copy(model, 3, tmp_path / "models")
    assert (out.name, (out / "tokenizer.json").read_text()) == ("small-wide3", "{}")
    made = (out / "model.safetensors").stat().st_mtime_ns
    assert widen.widened_copy(model, 3, tmp_path / "models") == out
    assert (out / "model.safetensors").stat().st_mtime_ns == made
    narrow.lm_head.weight.data += 1
    narrow.save_pretrained(model)
    assert widen.widened_copy(model, 3, tmp_path / "models") != out
    assert not list((tmp_path / "models").glob("*/.*")), "nothing is left of the making"

"""A wider checkpoint answers as the narrow one does."""

from __future__ import annotations

import pytest
import torch

from scripts.models import widen


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_wider_checkpoint_says_what_it_said(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "mixtral": {"num_local_experts": 4, "intermediate_size": 24},
        "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8},
    }[kind]
    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        **sizes,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    wide = widen.widened(model, 5).eval()
    ids = torch.arange(1, 20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(wide(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    experts = [sum(p.numel() for n, p in one.named_parameters() if ".experts." in n) for one in (model, wide)]
    assert experts[1] == 5 * experts[0]
    more = sum(p.numel() for p in wide.parameters()) - sum(p.numel() for p in model.parameters())
    assert more == 4 * experts[0]

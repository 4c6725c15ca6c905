"""Models of random weights that are made in a moment, in every layout of weights that the product reads."""

from __future__ import annotations

from typing import Any

import torch

_BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_MLA = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 24, "mlp_only_layers": [1], "head_dim": 8},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8},
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 24},
    "glm4_moe": {"n_routed_experts": 8, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "head_dim": 8},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "phimoe": {"num_local_experts": 4},
    "llama": {},
}


def build(family: str, seed: int = 0, **changes: Any) -> Any:
    """A model with every weight random: no bias, norm or correction is at its neutral value."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(_BASE | FAMILIES[family] | changes))
    return randomise(AutoModelForCausalLM.from_config(config), seed)


def randomise(model: Any, seed: int = 0) -> Any:
    """The model itself, every weight random, the same for the same seed: around 1 in norms, around 0 elsewhere."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in sorted(model.state_dict().items()):
            if value.is_floating_point():
                value.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=random)
    return model

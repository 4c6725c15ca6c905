"""A model of random weights that is made in a moment."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM


def save_tiny_mixtral(folder: Path) -> Path:
    """A Mixtral of two layers and three experts, in two weight files; no tokenizer. `folder` again."""
    config = MixtralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MixtralForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder

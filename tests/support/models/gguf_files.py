"""Tiny GGUF files of random weights, by the writer and the quantisation of the package gguf."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from gguf import GGMLQuantizationType as Kind

_ARCHITECTURES = {
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
}
_HALVES = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
}
"""Where a block has its scales in float16."""
_SPECIAL = {"<|endoftext|>": 0}


def publish(model: Any, path: Path, kind: Kind, down: Kind | None = None, **settings: Any) -> Path:
    """A file of this model: matrices as `kind`, all else in float32, as llama.cpp's converter leaves it.

    `down`: the type of the experts' down-projections, if it is another. `settings`: more of the file's metadata, as
    whole numbers or text.
    """
    config = model.config
    architecture = _ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_settings(writer, config)
    for key, value in settings.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32 if value >= 0 else writer.add_int32
        add(key.replace("__", "."), value)
    _add_tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for key, weight in model.state_dict().items():
        if key != "lm_head.weight" or not config.tie_word_embeddings:
            for name, part in _renamed(key, weight, names):
                chosen = down if down is not None and "down_exps" in name else kind
                _add(writer, name, part.float().contiguous().numpy(), chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _renamed(key: str, weight: torch.Tensor, names: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts are three tensors a layer there."""
    layer = (re.findall(r"layers\.(\d+)\.", key) or [""])[0]
    if key.endswith("experts.gate_up_proj"):
        for part, value in zip(("gate", "up"), weight.chunk(2, 1), strict=True):
            yield f"blk.{layer}.ffn_{part}_exps.weight", value
    elif key.endswith("experts.down_proj"):
        yield f"blk.{layer}.ffn_down_exps.weight", weight
    elif key.endswith("e_score_correction_bias"):
        yield f"blk.{layer}.exp_probs_b.bias", weight
    elif key.endswith("shared_expert_gate.weight"):
        yield f"blk.{layer}.ffn_gate_inp_shexp.weight", weight[0]
    elif key.endswith("dt_bias"):
        yield f"blk.{layer}.ssm_dt.bias", weight
    elif key.endswith("A_log"):
        yield f"blk.{layer}.ssm_a", -weight.exp()
    else:
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is not None:
            yield name, weight.squeeze(1) if key.endswith("conv1d.weight") else weight


def _add(writer: Any, name: str, value: Any, kind: Kind) -> None:
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    whole = value.ndim > 1 and value.shape[-1] % block == 0 and "gate_inp" not in name and "conv1d" not in name
    chosen = kind if whole else Kind.F32
    made = _random_blocks if chosen in _HALVES else gguf.quants.quantize
    writer.add_tensor(name, made(value.astype(numpy.float32), chosen), raw_dtype=chosen)


def _random_blocks(value: Any, kind: Kind) -> Any:
    """Of a type that the package does not quantise to: any bytes, but for scales that are at most 2^-7."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = numpy.random.default_rng(value.size).integers(0, 256, (value.size // values, size), dtype=numpy.uint8)
    for low in _HALVES[kind]:
        blocks[:, low + 1] &= 0x9F
    return blocks.reshape(*value.shape[:-1], -1)


def _add_settings(writer: Any, config: Any) -> None:
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("rope_theta", 10_000.0))
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "intermediate_size"):
        writer.add_feed_forward_length(config.intermediate_size)
    if getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.model_type == "minimax_m2":
        writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1)))
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type == "qwen3_5_moe_text":
        _add_states(writer, config)


def _add_states(writer: Any, config: Any) -> None:
    """Of Qwen3.5's linear attention."""
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)


def _add_tokenizer(writer: Any, size: int) -> None:
    """Letters, digits and signs, and one pair of them. No byte beyond ASCII."""
    letters = [chr(code) for code in range(33, 127)]
    tokens = [*_SPECIAL, "he", *letters][:size]
    tokens += [f"unused{number}" for number in range(size - len(tokens))]
    special = [gguf.TokenType.CONTROL if token in _SPECIAL else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(special)
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)

"""Every decoder-only family of Transformers 5.23 that dispatches through its ExpertsInterface, as a tiny configuration.

Each has what its real models have: dense layers among MoE layers, shared experts, its own attention. Windows are
shorter than the prompts, so that rows are forgotten.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from checkpoint import family as families
from checkpoint.dense import EXPERTS_IMPLEMENTATION
from scheduler import errors
from support.cases import slow_except
from support.models.checkpoints import randomise

WINDOW = 8
_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_topk": 3,
    "moe_k": 3,
    "top_k_experts": 3,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "mamba_dt_rank": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
_TOWER: dict[str, Any] = {
    "depth": 1,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_attention_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "image_size": 32,
    "patch_size": 8,
    "deepstack_visual_indexes": [0],
}
"""The encoder of images of a model that also sees."""
_HALF_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_MLA = {"num_key_value_heads": 4, "head_dim": 8}
_BLOCKS_OF_KEYS: dict[str, Any] = {
    "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    "index_block_size": 4,
    "index_topk_blocks": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "olmoe": {},
    "gpt_oss": {},
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "glm4_moe": {},
    "granitemoe": {},
    "phimoe": {},
    "ernie4_5_moe": {},
    "hunyuan_v1_moe": {},
    "minimax": {},
    "jamba": {},
    "qwen3_next": {},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "dots1": {},
    "flex_olmo": {},
    "afmoe": {},
    "aria_text": {},
    "axk1": _MLA,
    "axk2": _MLA,
    "bailing_hybrid": _MLA | _HALF_LINEAR,
    "beam": {},
    "cohere2_moe": {},
    "deepseek_v32": _MLA,
    "deepseek_v4": {},
    "dots3_note_text": {"num_key_value_heads": 4, "shared_experts_intermediate_size": 32},
    "exaone_moe": {},
    "flint": {},
    "gemma4_text": {"enable_moe_block": True, "vocab_size_per_layer_input": 96},
    "glm4_moe_lite": _MLA,
    "glm_moe_dsa": _MLA,
    "granitemoe_swa": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "granitemoeshared": {},
    "hy_v3": {},
    "hy_v4": {},
    "inkling_text": {},
    "inkling2_text": {},
    "kimi_linear": _MLA | _HALF_LINEAR | {"linear_head_dim": 16, "linear_num_heads": 4},
    "kolibri1": {},
    "laguna": {},
    "mellum": {},
    "mimo_v2_flash": {},
    "minimax_m2": {},
    "minimax_m3_vl_text": _BLOCKS_OF_KEYS,
    "nemotron_h": {
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 32,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    },
    "qwen3_5_moe_text": {},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
    },
    "solar_open": {},
    "zaya": {"num_experts_per_tok": 1},
    "aria": {},
    "glm4v_moe": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
            "partial_rotary_factor": 1.0,
        }
    },
    "kimi_k25": _MLA,
    "minimax_m3_vl": _BLOCKS_OF_KEYS,
    "mistral4": _MLA,
    "mistral_large4": _MLA,
    "qwen3_vl_moe": {},
}


TESTED = (
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "minimax", "jamba", "qwen3_next", "deepseek_v4"),
    *("glm_moe_dsa", "nemotron_h", "inkling_text", "qwen3_vl_moe"),
)
"""Those that `make test` takes: each kind of gate, of expert and of cache. Tests of the others are slow ones."""

FEW = ("mixtral", "gpt_oss", "deepseek_v3", "qwen3_next")
"""Of these, those that the costlier tests take: one for each kind of layout of the cache."""

SHARING = ("mixtral", "gpt_oss", "deepseek_v3", "minimax", "jamba", "qwen3_next", "deepseek_v4")
"""Of these, those in which requests share steps: one for each kind of cache."""


def wants_every() -> bool:
    """Whether costly tests take every family, in every way: FAMILIES=all in the environment."""
    return os.environ.get("FAMILIES") == "all"


def _fast_first(fast: Sequence[str]) -> list[str]:
    return [*fast, *(name for name in FAMILIES if name not in fast)]


def every(fast: Sequence[str]) -> list[Any]:
    """Parameters: every family. All but the `fast` ones are slow."""
    return slow_except(fast, _fast_first(fast))


def every_in_turns(fast: Sequence[str], ways: Sequence[str]) -> list[Any]:
    """Parameters: every family with one of the `ways`, in turn; with every way if the environment has FAMILIES=all."""
    names = _fast_first(fast)
    pairs = [(name, ways[number % len(ways)]) for number, name in enumerate(names)]
    if wants_every():
        pairs = [(name, way) for name in names for way in ways]
    return slow_except([pair for pair in pairs if pair[0] in fast], pairs)


NO_DISPATCH, NO_LANGUAGE_MODEL, TWO_HALVES = "ExpertsInterface", "no causal language model", "encoder with a decoder"
TWO_KINDS = "two experts modules"
REFUSED: dict[str, tuple[type[errors.ODMoEError], str]] = {
    "longcat_flash": (errors.NotMoEError, NO_DISPATCH),
    "llama4_text": (errors.NotMoEError, NO_DISPATCH),
    "jetmoe": (errors.NotMoEError, NO_DISPATCH),
    "llama": (errors.NotMoEError, NO_DISPATCH),
    "qwen3": (errors.NotMoEError, NO_DISPATCH),
    "switch_transformers": (errors.UnsupportedFamilyError, TWO_HALVES),
    "nllb-moe": (errors.UnsupportedFamilyError, TWO_HALVES),
    "clip": (errors.UnsupportedFamilyError, NO_LANGUAGE_MODEL),
    "diffusion_gemma": (errors.UnsupportedFamilyError, NO_LANGUAGE_MODEL),
    "ernie4_5_vl_moe": (errors.NotMoEError, TWO_KINDS),
    "qwen3_omni_moe": (errors.UnsupportedFamilyError, NO_LANGUAGE_MODEL),
}
"""Families that cannot run, with the error and a part of its message."""


def configuration(family: str) -> Any:
    """The family's own configuration object, of those settings that it has."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = CONFIG_MAPPING[family]
    if "text_config" not in known.sub_configs:
        return _of_settings(known, _COMMON | FAMILIES[family])
    usual = known()
    text = _of_settings(type(usual.text_config), _COMMON | FAMILIES[family])
    towers = {name: _of_settings(type(getattr(usual, name)), _TOWER) for name in known.sub_configs}
    return known(**{name: tower.to_dict() for name, tower in towers.items()} | {"text_config": text.to_dict()})


def _of_settings(known: Any, settings: dict[str, Any]) -> Any:
    names = {*known.__dataclass_fields__, *getattr(known, "attribute_map", {})}
    return known(**{name: value for name, value in settings.items() if name in names})


def auto_class(family: str) -> Any:
    """The class that loads a checkpoint of this family: of language models, or of models that also see."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = CONFIG_MAPPING[family] in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if known else AutoModelForImageTextToText


def build(family: str, seed: int = 0) -> Any:
    """A model with every weight random: no bias, norm or correction is at its neutral value."""
    return randomise(auto_class(family).from_config(configuration(family)), seed)


def build_dispatching(family: str) -> Any:
    """The same, for evaluation; its experts are computed by what `checkpoint.dense.dispatch_experts` is given."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def dispatch(module: Any, *rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = module.odmoe_dispatch(*rows)
        return result

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, dispatch)
    model = build(family).eval()
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    return model


def build_with_vision() -> Any:
    """A Qwen3.5-MoE that also sees, as it is published."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = configuration("qwen3_5_moe_text").to_dict()
    eyes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = AutoConfig.for_model("qwen3_5_moe", text_config=text, vision_config=eyes | {"num_position_embeddings": 16})
    return randomise(AutoModelForImageTextToText.from_config(config))


def features(model: Any) -> list[str]:
    """What this model has that a plain one has not, from its modules."""
    modules = [module for _, module in families.experts_modules(model).values()]
    names = [name for name, _ in model.named_parameters()]
    held = {
        "dense layers": len(modules) < model.config.get_text_config().num_hidden_layers,
        "shared experts": any("shared" in name for name in names),
        "biases": any(module.has_bias for module in modules),
        "transposed weights": any(module.is_transposed for module in modules),
        "interleaved gate": any(module.has_gate and not module.is_concatenated for module in modules),
        "no gate": not all(module.has_gate for module in modules),
        "latent attention": any("kv_a_proj" in name or "kv_b_proj" in name for name in names),
    }
    return [name for name, present in held.items() if present]

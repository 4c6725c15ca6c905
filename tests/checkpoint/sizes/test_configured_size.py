"""Sizes from config.json alone: the same as those of the model that Transformers builds, or none."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint.family import config_from_dict, stored_dtype
from checkpoint.sizes.configured_size import configured_size
from checkpoint.sizes.model_size import count
from support.models import families
from support.paths import ROOT

MODELS = sorted((ROOT / "models").glob("*/config.json"))
CONTEXT = 40
LAYERS = 2

_COMMON = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 3,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_DENSE_FIRST = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
SMALL: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 32},
    "olmoe": {"num_experts": 8},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 16, "sliding_window": 8},
    "deepseek_v3": {
        **_DENSE_FIRST,
        **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 24},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20},
    },
    "glm4_moe": {**_DENSE_FIRST, "head_dim": 16},
}
"""What a configuration of each family must have for its sizes to follow from it."""

CHANGES: list[dict[str, Any]] = [
    {"tie_word_embeddings": True},
    {"dtype": None},
    {"dtype": "float32", "num_key_value_heads": 4},
    {"attention_bias": True},
    {"attention_bias": False},
    {"qkv_bias": False},
    {"use_qk_norm": True},
    {"head_dim": 24},
    {"head_dim": None},
    {"sliding_window": 8},
    {"sliding_window": 1},
    {"sliding_window": 0},
    {"sliding_window": 8, "use_sliding_window": True},
    {"decoder_sparse_step": 2},
    {"mlp_only_layers": [0]},
    {"mlp_only_layers": list(range(LAYERS))},
    {"first_k_dense_replace": 0},
    {"first_k_dense_replace": LAYERS},
    {"n_shared_experts": 0},
    {"q_lora_rank": None},
    {"layer_types": ["full_attention"] * LAYERS},
    {"layer_types": ["sliding_attention", "full_attention"]},
    {"layer_types": ["full_attention"]},
    {"num_experts_per_tok": 9},
    {"num_experts_per_tok": 0},
    {"num_attention_heads": 0},
    {"num_attention_heads": 6},
    {"vocab_size": -1},
    {"hidden_size": "abc"},
    {"hidden_size": 62},
    {"hidden_act": "nosuch"},
    {"hidden_act": "gelu"},
    {"pad_token_id": 95},
    {"pad_token_id": 96},
    {"rms_norm_eps": "abc"},
    {"rms_norm_eps": 1},
    {"eos_token_id": [1, 2]},
    {"max_position_embeddings": 16},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    {"rope_parameters": {"rope_type": "nosuch", "rope_theta": 10000.0}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}},
    {"num_experts": 4},
    {"num_local_experts": 4},
    {"quantization_config": {"quant_method": "fp8"}},
    {"num_nextn_predict_layers": 1},
    {"something_new": 3},
    {"dtype": ["bfloat16"]},
    {"rope_scaling": {"type": ["yarn"]}},
]


def small(family: str) -> dict[str, Any]:
    return {"model_type": family, **_COMMON, **SMALL[family]}


def agree(fields: dict[str, Any], context: int = CONTEXT) -> bool:
    """Whether config.json alone gives sizes. If so they must be those of the model that Transformers builds."""
    found = configured_size(fields, None, context, "model")
    if found is None:
        return False
    config = config_from_dict(dict(fields))
    assert found == count(config, stored_dtype(config), context), fields
    return True


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.parent.name)
def test_models_of_this_project(path: Path) -> None:
    """With one token, an ordinary context, or more than the model can take. Published ones: `test_model_size`."""
    context = (1, 4096, 1 << 40)[MODELS.index(path) % 3]
    assert agree(json.loads(path.read_text()), context)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_as_saved(family: str) -> None:
    agree(json.loads(families.configuration(family).to_json_string()))


@pytest.mark.parametrize("family", SMALL)
def test_small_configurations(family: str) -> None:
    assert agree(small(family))
    assert agree(small(family), 200)


@pytest.mark.slow
@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_changed_configuration(family: str, change: dict[str, Any]) -> None:
    agree(small(family) | change)


@pytest.mark.slow
@pytest.mark.parametrize("family", SMALL)
def test_a_key_that_is_left_out(family: str) -> None:
    fields = small(family)
    for key in fields.keys() - {"model_type"}:
        agree({name: value for name, value in fields.items() if name != key})


def drawn(family: str) -> Iterator[dict[str, Any]]:
    draw = random.Random(family)
    for _ in range(12):
        fields = small(family)
        for change in draw.sample(CHANGES, 2):
            fields |= change
        yield fields | {"num_hidden_layers": draw.choice([LAYERS, LAYERS + 1]), "vocab_size": draw.choice([95, 96])}


@pytest.mark.parametrize("family", SMALL)
def test_several_changes_at_once(family: str) -> None:
    for fields in drawn(family):
        agree(fields)


def test_a_wrong_configuration_is_left_to_transformers() -> None:
    for change in ({"num_experts_per_tok": 9}, {"hidden_act": "nosuch"}, {"rms_norm_eps": math.inf}):
        fields = small("mixtral") | change
        assert configured_size(fields, None, CONTEXT, "model") is None


@pytest.mark.slow
def test_plan_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom odmoe.command_line import run\n"
        "sys.argv = 'odmoe plan -q -m models/demo-moe --workers 1 --slots 1 --shadow none'.split()\nrun()\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stderr.strip().endswith("[]")

"""Counts from a configuration alone, against published numbers, hand arithmetic and real weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import kv
from checkpoint.family import config_from_dict, stored_dtype
from checkpoint.sharding.source import read_header
from checkpoint.sizes.configured_size import configured_size
from checkpoint.sizes.model_size import count
from scheduler.types import ModelSize
from support.models import families
from support.paths import CONFIGS


def counts(name: str, context: int = 4096) -> ModelSize:
    config = config_from_dict(json.loads((CONFIGS / f"{name}.json").read_text()))
    return count(config, stored_dtype(config), context)


@pytest.fixture(scope="module")
def known() -> dict[str, ModelSize]:
    return {path.stem: counts(path.stem) for path in CONFIGS.glob("*.json")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "total", "active", "tolerance"),
    [  # billions, from the model cards; of gpt-oss the active ones without the embeddings
        ("mixtral-8x7b", 46.7, 12.9, 0.01),
        ("qwen3-30b-a3b", 30.5, 3.3, 0.02),
        ("deepseek-v3", 671, 37, 0.02),
        ("gpt-oss-120b", 117, 5.1, 0.02),
    ],
)
def test_parameters_are_those_of_the_model_card(
    known: dict[str, ModelSize], name: str, total: float, active: float, tolerance: float
) -> None:
    found = known[name]
    one = found.dense + found.layers * found.top_k * found.expert
    one -= found.dense - found.read if name.startswith("gpt") else 0
    assert (found.dense + found.experts_all) / 1e9 == pytest.approx(total, rel=0.005)
    assert one / 1e9 == pytest.approx(active, rel=tolerance)


def test_the_head_has_the_size_that_is_published(known: dict[str, ModelSize]) -> None:
    """11.5 billion parameters of its own (README_WEIGHTS.md of DeepSeek-V3)."""
    heads = {name: found.head / 1e9 for name, found in known.items() if found.head}
    assert heads == {"deepseek-v3": pytest.approx(11.5, rel=0.01)}


def test_a_configuration_alone_says_the_same(known: dict[str, ModelSize]) -> None:
    for name, found in known.items():
        assert configured_size(json.loads((CONFIGS / f"{name}.json").read_text()), None, 4096, "model") == found


def test_shapes_are_those_of_the_configuration(known: dict[str, ModelSize]) -> None:
    shapes = {n: (c.depth, c.layers, c.experts, c.top_k, c.hidden, c.dtype) for n, c in known.items()}
    assert shapes == {
        "mixtral-8x7b": (32, 32, 8, 2, 4096, "float32"),
        "qwen3-30b-a3b": (48, 48, 128, 8, 2048, "bfloat16"),
        "deepseek-v3": (61, 58, 256, 8, 7168, "bfloat16"),
        "gpt-oss-120b": (36, 36, 128, 4, 2880, "bfloat16"),
    }
    assert known["mixtral-8x7b"].expert == 3 * 4096 * 14336


def test_caches_are_those_of_the_attention(known: dict[str, ModelSize]) -> None:
    """Eight heads of 128, keys and values, in float32: the paper's 8 KB a token a layer. DeepSeek-V3 keeps a latent of
    512 and 64 rotary elements; of gpt-oss every other layer forgets all but the last 127 tokens."""
    tokens = {name: found.cache_token * found.item_bytes for name, found in known.items()}
    assert tokens["mixtral-8x7b"] == 32 * 8192
    assert tokens["qwen3-30b-a3b"] == 48 * 2 * 4 * 128 * 2
    assert tokens["deepseek-v3"] == 61 * (512 + 64) * 2
    assert tokens["gpt-oss-120b"] == 36 * 2 * 8 * 64 * 2
    assert known["mixtral-8x7b"].cache * 4 == 4096 * 32 * 8192
    assert known["gpt-oss-120b"].cache * 2 == 18 * (4096 + 127) * 2 * 8 * 64 * 2


def test_a_context_beyond_the_models_own_is_its_own() -> None:
    assert counts("mixtral-8x7b", 1 << 40).context == 32768


def test_counts_are_those_of_real_weights(demo: Path) -> None:
    """Every tensor of the demo checkpoint, by its file's header."""
    header: dict[str, Any] = read_header(demo / "model.safetensors")[0]
    sizes = {name: math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    config = config_from_dict(json.loads((demo / "config.json").read_text()))
    found = count(config, torch.bfloat16, 64)
    assert (found.experts_all, found.dense) == (experts, sum(sizes.values()) - experts)
    attention = sum(size for name, size in sizes.items() if "self_attn" in name and "proj" in name)
    assert found.linear == attention


@pytest.mark.slow
@pytest.mark.parametrize("family", ["jamba", "qwen3_next", "minimax", "nemotron_h", "kimi_linear", "deepseek_v3"])
def test_states_do_not_grow_and_rows_do(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of n tokens is its states, and n rows: as in the family's own cache after a pass over n tokens."""
    config = families.configuration(family)
    sizes = [count(config, torch.float32, tokens) for tokens in (5, 17)]
    monkeypatch.setattr(kv, "is_linear", lambda config: False)  # else no pass over n tokens is run
    assert sizes == [count(config, torch.float32, tokens) for tokens in (5, 17)]
    assert [size.cache - size.state for size in sizes] == [tokens * sizes[0].cache_token for tokens in (5, 17)]
    assert (sizes[0].state > 0) is (family != "deepseek_v3")
    assert len({size.state for size in sizes}) == 1

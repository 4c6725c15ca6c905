"""A store's multi-token-prediction head: found under its published names, dequantised, or refused by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.mtp_head import MtpHead, find_head, find_in_store
from checkpoint.sharding.source import open_source
from scheduler.errors import ConfigError, CorruptStoreError
from support.models import mtp, published
from support.models.store_making import shard

DEEPSEEK = {"model_type": "deepseek_v3", "num_hidden_layers": 61}


@pytest.mark.parametrize(
    ("fields", "names", "wrong"),
    [
        (DEEPSEEK, ["model.layers.60.mlp.gate.weight", "model.layers.6.eh_proj.weight"], "THERE has none"),
        ({"model_type": "qwen3_next"}, ["model.layers.48.eh_proj.weight"], "THERE has none"),
        ({"model_type": "mixtral"}, ["mtp.fc.weight"], "'mixtral', of which none can be read; those of deepseek_v3"),
        (
            DEEPSEEK | {"quantization_config": {"quant_method": "awq", "bits": 4}},
            ["model.layers.61.eh_proj.weight"],
            r"quantised \(awq\)",
        ),
    ],
)
def test_no_head(fields: dict[str, Any], names: list[str], wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"{wrong}.*give --draft-from prompt or shadow"):
        find_head(fields, names, "THERE")


def test_published_names() -> None:
    """Of DeepSeek-V3's index, with its own copies of embedding and output head."""
    beginning, expert = "model.layers.61.", "mlp.experts.255.up_proj.weight_scale_inv"
    names = ("embed_tokens.weight", "shared_head.head.weight", "shared_head.norm.weight", "eh_proj.weight", expert)
    found = find_head(DEEPSEEK, [beginning + name for name in names], "THERE")
    assert found == {
        "norm.weight": f"{beginning}shared_head.norm.weight",
        "eh_proj.weight": f"{beginning}eh_proj.weight",
        f"model.layers.0.{expert}": beginning + expert,
    }


@pytest.mark.slow
def test_fp8_is_dequantised(tmp_path: Path) -> None:
    """With cut blocks, as DeepSeek-V3 has them."""
    save = partial(published.publish_fp8, block=(10, 24))
    made = mtp.publish("deepseek_v3", tmp_path / "model", save=save)
    store = shard(open_source(made.path), tmp_path / "store")
    held = dict(MtpHead(store, made.longer, torch.bfloat16).modules.named_parameters())
    rounded = 0
    for name, value in made.longer.base_model.layers[-1].named_parameters():
        gone = (held[f"model.layers.0.{name}"].float() - value.float()).abs().max()
        rounded += bool(gone)
        assert gone <= value.abs().max() / 16  # half a step of E4M3's three bits, of the block's largest at most
    assert rounded > 5


def test_a_head_that_lacks_a_tensor(tmp_path: Path) -> None:
    made = mtp.publish("glm4_moe", tmp_path / "model")
    file = made.path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.4.hnorm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    store = shard(open_source(made.path), tmp_path / "store")
    assert "eh_proj.weight" in find_in_store(store)
    with pytest.raises(CorruptStoreError, match="not whole, the first that it lacks is hnorm"):
        MtpHead(store, made.longer, torch.float32)

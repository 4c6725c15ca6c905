"""Packed checkpoints with a part that is missing or wrong, or with settings that cannot be read: refused by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.sharding.source import open_source
from scheduler.errors import CheckpointError, CorruptCheckpointError, UnsupportedFormatError
from support.models import packed
from support.models.checkpoints import build
from support.models.store_making import shard

Weights = dict[str, torch.Tensor]
Rewrite = Callable[[Path, Callable[[Weights], object]], None]
EXPERT = "model.layers.0.mlp.experts.3.up_proj"
DENSE = "model.layers.1.self_attn.q_proj"
PUBLISHERS: dict[str, Callable[[Any, Path], Path]] = {
    "awq": packed.publish_awq,
    "gptq": packed.publish_gptq,
    "bitsandbytes": packed.publish_bitsandbytes_experts,
    "compressed": lambda model, path: packed.publish_compressed(model, path, {"all": packed.group(**packed.INT4)}),
}
PARTS = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "bitsandbytes": ("weight", "weight.nested_absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"),
    "compressed": ("weight_packed", "weight_scale"),
}
SCALES = {"awq": "scales", "gptq": "scales", "bitsandbytes": "weight.nested_absmax", "compressed": "weight_scale"}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            model = build("qwen3_moe", moe_intermediate_size=32)
            made[name] = PUBLISHERS[name](model, tmp_path_factory.mktemp(name) / "model")
        return made[name]

    return find


def check_refused(
    model: Path, tmp_path: Path, change: Callable[[Path], object], kind: type[CheckpointError], *words: str
) -> None:
    """A store of the changed checkpoint is refused with these words, and nothing is left of it."""
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    change(copy)
    with pytest.raises(CheckpointError) as caught:
        shard(open_source(copy), tmp_path / "store")
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value)
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("layer", [EXPERT, DENSE])
@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in PARTS.items() for part in parts])
def test_a_part_that_is_missing(
    published: Callable[[str], Path], tmp_path: Path, rewrite: Rewrite, name: str, part: str, layer: str
) -> None:
    def change(model: Path) -> None:
        rewrite(model / "model.safetensors", lambda weights: weights.pop(f"{layer}.{part}"))

    check_refused(published(name), tmp_path, change, CorruptCheckpointError, f"{layer}.{part}", "fetch it again")


@pytest.mark.slow
@pytest.mark.parametrize("layer", [EXPERT, DENSE])
@pytest.mark.parametrize(("name", "part"), SCALES.items())
def test_scales_that_are_no_numbers(
    published: Callable[[str], Path], tmp_path: Path, rewrite: Rewrite, name: str, part: str, layer: str
) -> None:
    def change(model: Path) -> None:
        rewrite(
            model / "model.safetensors", lambda weights: weights[f"{layer}.{part}"].view(-1)[-1:].fill_(float("nan"))
        )

    words = (f"{layer}.{part} holds a scale of NaN",)
    check_refused(published(name), tmp_path, change, CorruptCheckpointError, *words)


@pytest.mark.parametrize("layer", [EXPERT, DENSE])
@pytest.mark.parametrize(("name", "part"), [("awq", "qzeros"), ("gptq", "qzeros"), ("compressed", "weight_scale")])
def test_parts_of_another_shape(
    published: Callable[[str], Path], tmp_path: Path, rewrite: Rewrite, name: str, part: str, layer: str
) -> None:
    def cut(weights: Weights) -> None:
        weights[f"{layer}.{part}"] = weights[f"{layer}.{part}"][:-1].contiguous()

    def change(model: Path) -> None:
        rewrite(model / "model.safetensors", cut)

    check_refused(published(name), tmp_path, change, CorruptCheckpointError, f"{layer}.{part} is", "fetch it again")


@pytest.mark.slow
@pytest.mark.parametrize("layer", [EXPERT, DENSE])
@pytest.mark.parametrize("part", ["weight.absmax", "weight.quant_map", "weight.nested_quant_map"])
def test_bitsandbytes_with_fewer_scales(
    published: Callable[[str], Path], tmp_path: Path, rewrite: Rewrite, part: str, layer: str
) -> None:
    """Its kernel would read what lies behind them in memory."""

    def cut(weights: Weights) -> None:
        weights[f"{layer}.{part}"] = weights[f"{layer}.{part}"].view(-1)[:1].clone()

    def change(model: Path) -> None:
        rewrite(model / "model.safetensors", cut)

    check_refused(published("bitsandbytes"), tmp_path, change, CorruptCheckpointError, f"{part[7:]} has 1 values")


@pytest.mark.parametrize("layer", [EXPERT, DENSE])
@pytest.mark.parametrize("group", [-1, 7777])
def test_gptq_with_groups_that_do_not_exist(
    published: Callable[[str], Path], tmp_path: Path, rewrite: Rewrite, group: int, layer: str
) -> None:
    def change(model: Path) -> None:
        rewrite(model / "model.safetensors", lambda weights: weights[f"{layer}.g_idx"].fill_(group))

    words = (f"g_idx holds groups {group} to {group}",)
    check_refused(published("gptq"), tmp_path, change, CorruptCheckpointError, *words)


def _state(**fields: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(fields).encode()), dtype=torch.uint8)


BROKEN: dict[str, tuple[str, str, torch.Tensor]] = {
    "AWQ in three dimensions": ("awq", "qweight", torch.zeros(2, 2, 2, dtype=torch.int32)),
    "AWQ in one dimension": ("awq", "scales", torch.ones(4)),
    "GPTQ without inputs": ("gptq", "g_idx", torch.zeros(0, dtype=torch.int32)),
    "GPTQ with a table of groups": ("gptq", "g_idx", torch.zeros(4, 4, dtype=torch.int32)),
    "a packed number": ("compressed", "weight_packed", torch.tensor(1, dtype=torch.int32)),
    "no shape": ("compressed", "weight_shape", torch.zeros(0, dtype=torch.int64)),
    "a negative shape": ("compressed", "weight_shape", torch.tensor([-1, 32])),
    "a state that is no JSON": (
        *("bitsandbytes", "weight.quant_state.bitsandbytes__nf4"),
        torch.full((40,), 255, dtype=torch.uint8),
    ),
    "a state without a shape": ("bitsandbytes", "weight.quant_state.bitsandbytes__nf4", _state(dtype="bfloat16")),
    "a state with a word": ("bitsandbytes", "weight.quant_state.bitsandbytes__nf4", _state(shape="x")),
}


@pytest.mark.parametrize("layer", [EXPERT, DENSE])
@pytest.mark.parametrize("case", BROKEN)
def test_parts_of_other_dimensions(
    published: Callable[[str], Path], tmp_path: Path, rewrite: Rewrite, case: str, layer: str
) -> None:
    name, part, tensor = BROKEN[case]

    def change(model: Path) -> None:
        rewrite(model / "model.safetensors", lambda weights: weights.update({f"{layer}.{part}": tensor.clone()}))

    check_refused(published(name), tmp_path, change, CorruptCheckpointError, f"{layer}.{part} (", "fetch it again")


def test_bitsandbytes_without_a_method(published: Callable[[str], Path], tmp_path: Path) -> None:
    """As its early checkpoints, which Transformers knows by their bits."""
    copies = []
    for number, method in enumerate(("bitsandbytes", None)):
        copy = Path(shutil.copytree(published("bitsandbytes"), tmp_path / f"{number}"))
        config = json.loads((copy / "config.json").read_text())
        config["quantization_config"]["quant_method"] = method
        (copy / "config.json").write_text(json.dumps(config))
        copies.append(shard(open_source(copy), tmp_path / f"store-{number}"))
    first, second = ([blob for spec in store.manifest.layers.values() for blob in spec.blobs] for store in copies)
    assert first == second


SETTINGS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "AWQ's other layouts": ("awq", {"version": "gemv"}, ("gemv", "'gemm'", "bfloat16")),
    "AWQ of 3 bits": ("awq", {"bits": 3}, ("3 bits", "4 bits")),
    "GPTQ for Marlin": ("gptq", {"is_marlin_format": True}, ("marlin", "gptq_v2")),
    "GPTQ of 3 bits": ("gptq", {"bits": 3}, ("3 bits", "2, 4, 8")),
    "sparse": ("compressed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, ("sparse", "pack-quantized")),
    "another packing": ("compressed", {"format": "marlin-24"}, ("marlin-24", "pack-quantized", "bfloat16")),
    "a list for a layout": ("gptq", {"checkpoint_format": []}, ("quantization_config", "unhashable")),
    "groups of words": ("compressed", {"config_groups": {"all": {"weights": "x"}}}, ("quantization_config",)),
    "no groups": ("compressed", {"config_groups": {}}, ("pack-quantized",)),
    "AutoRound": ("gptq", {"quant_method": "auto-round"}, ("auto-round", "gptq", "awq")),
    "ModelOpt": ("gptq", {"quant_method": "modelopt"}, ("modelopt", "compressed-tensors")),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_cannot_be_read(published: Callable[[str], Path], tmp_path: Path, case: str) -> None:
    name, settings, words = SETTINGS[case]

    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        config["quantization_config"] |= settings
        (model / "config.json").write_text(json.dumps(config))

    check_refused(published(name), tmp_path, change, UnsupportedFormatError, *words)


def test_columns_in_another_order(published: Callable[[str], Path], tmp_path: Path, rewrite: Rewrite) -> None:
    def change(model: Path) -> None:
        order = {f"{DENSE}.weight_g_idx": torch.arange(32, dtype=torch.int32)}
        rewrite(model / "model.safetensors", lambda weights: weights.update(order))

    words = (f"{DENSE}.weight_g_idx", "actorder=group")
    check_refused(published("compressed"), tmp_path, change, UnsupportedFormatError, *words)


@pytest.mark.parametrize(
    ("layer", "words"), [(EXPERT, "model.layers.0.mlp.experts.gate_up_proj"), (DENSE, "do not make a weight")]
)
def test_parts_that_make_no_weight(
    published: Callable[[str], Path], tmp_path: Path, rewrite: Rewrite, layer: str, words: str
) -> None:
    """Scales for half of the columns have the shape of a larger group's."""

    def halve(weights: Weights) -> None:
        weights[f"{layer}.weight_scale"] = weights[f"{layer}.weight_scale"][:, :3].contiguous()

    def change(model: Path) -> None:
        rewrite(model / "model.safetensors", halve)

    check_refused(published("compressed"), tmp_path, change, CorruptCheckpointError, words)

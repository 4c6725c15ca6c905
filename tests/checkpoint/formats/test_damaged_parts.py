"""Quantised checkpoints with a part that is missing or wrong: refused with that part's name, and nothing is left."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint.sharding.source import open_source
from scheduler.errors import CheckpointError, CorruptCheckpointError, UnsupportedFormatError
from support.models import published
from support.models.checkpoints import build
from support.models.store_making import shard

Weights = dict[str, torch.Tensor]
Rewrite = Callable[[Path, Callable[[Weights], object]], None]
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"
DENSE = "model.layers.1.self_attn.q_proj.weight"
BLOCKS = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published.publish_fp8(build("qwen3_moe", moe_intermediate_size=32), tmp_path_factory.mktemp("fp8"))


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build("gpt_oss", hidden_size=64, intermediate_size=96)
    return published.publish_mxfp4(model, tmp_path_factory.mktemp("mxfp4"))


def check_refused(
    model: Path,
    tmp_path: Path,
    rewrite: Rewrite,
    change: Callable[[Weights], object],
    *words: str,
    error: type[CheckpointError] = CorruptCheckpointError,
) -> None:
    """A store of the changed checkpoint is refused with these words, and nothing is left of it."""
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    rewrite(copy / "model.safetensors", change)
    with pytest.raises(error) as caught:
        shard(open_source(copy), tmp_path / "store")
    for word in words:
        assert word in str(caught.value)
    assert os.listdir(tmp_path) == ["model"]


def without(name: str) -> Callable[[Weights], object]:
    return lambda weights: weights.pop(name)


def with_value(name: str, value: float) -> Callable[[Weights], object]:
    return lambda weights: weights[name].view(-1)[-1:].fill_(value)


def cut(name: str) -> Callable[[Weights], object]:
    """Without its last row."""
    return lambda weights: weights.update({name: weights[name][..., :-1, :].contiguous()})


@pytest.mark.parametrize("name", [EXPERT, DENSE])
def test_a_weight_in_fp8_without_its_scales(fp8: Path, tmp_path: Path, rewrite: Rewrite, name: str) -> None:
    check_refused(fp8, tmp_path, rewrite, without(f"{name}_scale_inv"), f"has no {name}_scale_inv", "fetch it again")


@pytest.mark.parametrize("name", [EXPERT, DENSE])
def test_scales_without_their_weight(fp8: Path, tmp_path: Path, rewrite: Rewrite, name: str) -> None:
    check_refused(fp8, tmp_path, rewrite, without(name), f"has no {name},", f"{name}_scale_inv")


@pytest.mark.parametrize("name", [EXPERT, DENSE])
def test_scales_of_another_shape(fp8: Path, tmp_path: Path, rewrite: Rewrite, name: str) -> None:
    """Half as many still divide the rows, so that Transformers takes them for larger blocks."""
    check_refused(fp8, tmp_path, rewrite, cut(f"{name}_scale_inv"), f"{name}_scale_inv is F32 [1, 2]", "wants [2, 2]")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [EXPERT, DENSE])
def test_scales_that_are_no_numbers(fp8: Path, tmp_path: Path, rewrite: Rewrite, name: str, value: float) -> None:
    change = with_value(f"{name}_scale_inv", value)
    check_refused(fp8, tmp_path, rewrite, change, f"{name}_scale_inv holds a scale of NaN or infinity")


def test_scales_of_a_matrix_that_is_not_quantised(fp8: Path, tmp_path: Path, rewrite: Rewrite) -> None:
    def widen(weights: Weights) -> None:
        weights[DENSE] = weights[DENSE].float()

    check_refused(fp8, tmp_path, rewrite, widen, f"{DENSE} is F32", "has scales")


def test_a_weight_that_no_rule_dequantises(fp8: Path, tmp_path: Path, rewrite: Rewrite) -> None:
    """As experts that are stored together: Transformers would take their numbers for the weights themselves."""

    def together(weights: Weights) -> None:
        names = [f"model.layers.0.mlp.experts.{expert}.down_proj.weight" for expert in range(8)]
        weights["model.layers.0.mlp.experts.down_proj"] = torch.stack([weights.pop(name) for name in names])
        scales = torch.stack([weights.pop(f"{name}_scale_inv") for name in names])
        weights["model.layers.0.mlp.experts.down_proj_scale_inv"] = scales

    words = ("model.layers.0.mlp.experts.down_proj is F8_E4M3", "fp8 has no rule")
    check_refused(fp8, tmp_path, rewrite, together, *words, error=UnsupportedFormatError)


def test_a_config_that_names_no_format(fp8: Path, tmp_path: Path) -> None:
    """As where it stands in another file. Numbers without their scales would become weights."""
    copy = Path(shutil.copytree(fp8, tmp_path / "model"))
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFormatError, match=r"is F8_E4M3, which config.json has no format for"):
        shard(open_source(copy), tmp_path / "store")
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("kind", ["FP8", None])
def test_a_checkpoint_of_modelopt(fp8: Path, tmp_path: Path, kind: str | None) -> None:
    """Its format is in a file of its own. Where that quantises the KV cache alone, the weights are plain."""
    copy = Path(shutil.copytree(fp8, tmp_path / "model"))
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": kind, "kv_cache_quant_algo": "FP8"}}
    (copy / "hf_quant_config.json").write_text(json.dumps(settings))
    words = r"NVIDIA ModelOpt \(FP8\), as hf_quant_config.json says" if kind else "config.json has no format for"
    with pytest.raises(UnsupportedFormatError, match=words):
        shard(open_source(copy), tmp_path / "store")
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(("lost", "held"), [("scales", "blocks"), ("blocks", "scales")])
def test_mxfp4_with_half_of_a_weight(mxfp4: Path, tmp_path: Path, rewrite: Rewrite, lost: str, held: str) -> None:
    check_refused(
        mxfp4, tmp_path, rewrite, without(f"{BLOCKS}_{lost}"), f"{BLOCKS}_{held}, but", f"has no {BLOCKS}_{lost},"
    )


@pytest.mark.parametrize("name", [EXPERT, DENSE])
def test_fp8_with_a_static_scale(fp8: Path, tmp_path: Path, rewrite: Rewrite, name: str) -> None:
    """As AutoFP8 writes it. The checkpoint is whole: to fetch it again would change nothing."""

    def rename(weights: Weights) -> None:
        del weights[f"{name}_scale_inv"]
        weights[f"{name}_scale"] = torch.ones(1)

    words = (f"holds {name}_scale: FP8 with one static scale a matrix", "bfloat16")
    check_refused(fp8, tmp_path, rewrite, rename, *words, error=UnsupportedFormatError)


def test_mxfp4_of_other_dimensions(mxfp4: Path, tmp_path: Path, rewrite: Rewrite) -> None:
    def flatten(weights: Weights) -> None:
        for part in ("blocks", "scales"):
            weights[f"{BLOCKS}_{part}"] = weights[f"{BLOCKS}_{part}"].flatten(0, 2).contiguous()

    check_refused(mxfp4, tmp_path, rewrite, flatten, f"{BLOCKS}_blocks (U8 [", "cannot be the parts of a weight")


@pytest.mark.parametrize("part", ["scales", "blocks"])
def test_mxfp4_of_another_shape(mxfp4: Path, tmp_path: Path, rewrite: Rewrite, part: str) -> None:
    check_refused(mxfp4, tmp_path, rewrite, cut(f"{BLOCKS}_{part}"), f"{BLOCKS}_{part}", "does not belong to")


def test_mxfp4_of_other_numbers(mxfp4: Path, tmp_path: Path, rewrite: Rewrite) -> None:
    def widen(weights: Weights) -> None:
        weights[f"{BLOCKS}_blocks"] = weights[f"{BLOCKS}_blocks"].short()

    check_refused(mxfp4, tmp_path, rewrite, widen, f"{BLOCKS}_blocks is I16")


def test_mxfp4_with_a_scale_of_nan(mxfp4: Path, tmp_path: Path, rewrite: Rewrite) -> None:
    change = with_value(f"{BLOCKS}_scales", 255)
    check_refused(mxfp4, tmp_path, rewrite, change, f"{BLOCKS}_scales holds a scale of NaN")


@pytest.mark.parametrize("settings", [{"weight_block_size": [16]}, {"weight_block_size": "all"}, {"scale_fmt": "x"}])
def test_settings_that_cannot_be(fp8: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    copy = Path(shutil.copytree(fp8, tmp_path / "model"))
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] |= settings
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFormatError, match="quantization_config"):
        shard(open_source(copy), tmp_path / "store")


@pytest.mark.parametrize("settings", ["int4", {"quant_method": "aqlm"}, {"bits": 4}, {"quant_method": ["fp8"]}])
def test_a_format_that_is_not_read(fp8: Path, tmp_path: Path, settings: object) -> None:
    copy = Path(shutil.copytree(fp8, tmp_path / "model"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(UnsupportedFormatError, match="save_original_format=False"):
        shard(open_source(copy), tmp_path / "store")

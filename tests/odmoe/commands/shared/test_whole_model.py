"""The whole model that an answer is compared with: of a quantised checkpoint, the dequantised one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from odmoe.commands.shared.whole_model import checked_config, load_whole
from support.models import packed, published
from support.models.checkpoints import build


def check_same(found: Any, expected: Any) -> None:
    wanted = expected.state_dict()
    for key, value in found.state_dict().items():
        assert value.dtype == wanted[key].dtype, key
        assert torch.equal(value, wanted[key]), key


def test_fp8_with_blocks_that_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers alone refuses or scales wrongly, and wants a package more."""
    path = published.publish_fp8(build("deepseek_v3"), tmp_path / "model")
    expected = published.dequantised_by_definition(path)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    check_same(load_whole(path, "bfloat16"), expected)


def test_mxfp4(tmp_path: Path) -> None:
    path = published.publish_mxfp4(build("gpt_oss", hidden_size=64, intermediate_size=96), tmp_path)
    check_same(load_whole(path, "bfloat16"), published.dequantised(path))


def test_the_configuration_has_the_dtype_of_the_weights(tmp_path: Path) -> None:
    path = published.publish_mxfp4(build("gpt_oss", hidden_size=64, intermediate_size=96), tmp_path)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"dtype": "bfloat16",', ""))
    assert checked_config(path).dtype == torch.bfloat16


PACKED: dict[str, Callable[[Path], Path]] = {
    "awq": lambda path: packed.publish_awq(build("qwen3_moe", moe_intermediate_size=32), path),
    "gptq": lambda path: packed.publish_gptq(build("qwen3_moe"), path),
    "bitsandbytes": lambda path: packed.publish_bitsandbytes_experts(build("qwen3_moe"), path),
    "compressed-tensors": lambda path: packed.publish_compressed(
        build("qwen3_moe"), path, {"all": packed.group(**packed.INT4 | {"symmetric": False})}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKED)
def test_formats_that_transformers_alone_cannot_dequantise(name: str, tmp_path: Path) -> None:
    """Without their package, for several of its settings, or at all."""
    path = PACKED[name](tmp_path / "model")
    check_same(load_whole(path, "bfloat16"), packed.restored_by_tool(path))

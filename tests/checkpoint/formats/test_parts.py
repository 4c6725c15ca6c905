"""A layer of quantised experts is read an expert at a time, each with all parts of its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint.family import config_from_dict, meta_model
from checkpoint.sharding import convert
from checkpoint.sharding.quantised_weight import QuantisedWeight
from checkpoint.sharding.source import open_source
from support.models import families, published
from support.models.checkpoints import build


def gpt_oss(path: Path) -> Path:
    return published.publish_mxfp4(build("gpt_oss", hidden_size=64, intermediate_size=96), path)


def qwen(path: Path) -> Path:
    return published.publish_fp8(build("qwen3_moe", moe_intermediate_size=32), path)


def deepseek_v4(path: Path) -> Path:
    return published.publish_deepseek_v4(families.build("deepseek_v4"), path)


def plan_of(path: Path) -> convert.Conversion:
    source = open_source(path)
    return convert.Conversion(source, meta_model(config_from_dict(source.config), torch.bfloat16))


@pytest.mark.parametrize("publish", [gpt_oss, qwen, deepseek_v4])
def test_an_expert_at_a_time(publish: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "_PART_BYTES", 1)
    plan = plan_of(publish(tmp_path))
    for layer in plan.layers:
        parts = list(plan.parts(layer))
        count = plan.experts(layer)
        assert [(part.first, part.last, part.whole) for part in parts] == [(n, n + 1, False) for n in range(count)]
        held = sum(place.nbytes for group in plan.groups[layer].values() for place in group.places.values())
        assert [sum(place.nbytes for place in part.places.values()) for part in parts] == [held // count] * count
        together = {name: words for words in _words(plan) for name in words}
        for part in parts:
            assert all(together.get(name, {name}) <= part.places.keys() for name in part.places)


def _words(plan: convert.Conversion) -> list[set[str]]:
    assert plan.format
    return [set(words.values()) for words in plan.format.weights(plan.places).values()]


def test_parts_are_of_the_dequantised_experts_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the published size, which is a quarter."""
    monkeypatch.setattr(convert, "_PART_BYTES", 64 * 192 * 2 + 96 * 64 * 2 + (192 + 64) * 2)
    assert [part.last - part.first for part in plan_of(gpt_oss(tmp_path)).parts(0)] == [1, 1, 1, 1]


def test_a_dense_weight_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = plan_of(qwen(tmp_path)).dense["model.layers.0.self_attn.q_proj.weight"]
    assert isinstance(weight, QuantisedWeight)
    whole = torch.cat(list(weight.pieces()))
    monkeypatch.setattr("checkpoint.sharding.quantised_weight._PIECE_BYTES", 1)
    pieces = list(weight.pieces())
    assert [len(piece) for piece in pieces] == [16 * 32 * 2] * 2
    assert torch.equal(torch.cat(pieces), whole)

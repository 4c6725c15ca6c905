"""The random checkpoints are whole, repeatable, and of the sizes that they are said to have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from scripts.peers.checkpoints import QUICK, SHAPES, Shape, make_checkpoint


def test_transformers_loads_every_tensor_and_misses_none(shape: Shape, checkpoint: Path) -> None:
    model, told = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert model.config.model_type == shape.family
    experts = [weight for name, weight in model.named_parameters() if ".experts." in name]
    assert sum(2 * weight.numel() for weight in experts) == shape.expert_bytes
    for weight in experts:
        assert abs(float(weight.detach().float().std()) - 0.02) < 0.001


def test_the_same_shape_gives_the_same_bytes_and_another_seed_others(
    shape: Shape, checkpoint: Path, tmp_path: Path
) -> None:
    again = make_checkpoint(shape, tmp_path)
    other = make_checkpoint(replace(shape, seed=1), tmp_path)
    assert again.name == checkpoint.name != other.name
    for file in checkpoint.glob("*.safetensors"):
        assert (again / file.name).read_bytes() == file.read_bytes()
        assert (other / file.name).read_bytes() != file.read_bytes()


def test_a_finished_checkpoint_is_not_written_again(shape: Shape, checkpoint: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in checkpoint.iterdir()}
    assert make_checkpoint(shape, checkpoint.parent) == checkpoint
    assert {file: file.stat().st_mtime_ns for file in checkpoint.iterdir()} == before
    assert [path.name for path in checkpoint.parent.glob(".*")] == []


def test_tokens_choose_different_experts(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = torch.randint(3, 16384, (1, 64), generator=torch.Generator().manual_seed(0))
    logits = model(ids, output_router_logits=True).router_logits
    for layer in logits:
        assert len(layer.argmax(-1).unique()) == 4


def test_the_sizes_are_those_of_the_documents() -> None:
    assert SHAPES["A"].expert_bytes == 6 * 64 * 3 * 2048 * 768 * 2
    assert SHAPES["B"].expert_bytes == 8 * 8 * 3 * 2048 * 3584 * 2
    for name, quick in QUICK.items():
        assert replace(quick, name=name, layers=SHAPES[name].layers) == SHAPES[name]

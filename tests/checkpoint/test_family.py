"""What is asked of Transformers about a family, where a configuration does not say it plainly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import family
from scheduler.errors import CheckpointError


def config(name: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    small = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "num_experts": 6,
        "num_experts_per_tok": 4,
    }
    return AutoConfig.for_model(name, **(small | changes))


def test_experts_a_token_are_what_routers_choose_not_what_is_written() -> None:
    """PhiMoE's router takes two, whatever its configuration says."""
    assert family.shape_of(config("mixtral"), (0, 1), 6).top_k == 4
    assert family.shape_of(config("phimoe"), (0, 1), 6).top_k == 2


def test_more_experts_a_token_than_there_are() -> None:
    with pytest.raises(CheckpointError, match="8 of 6 experts"):
        family.shape_of(config("mixtral", num_experts_per_tok=8), (0, 1), 6)


def test_layers_that_differ_in_experts_are_told() -> None:
    assert family.shape_of(config("mixtral"), (0, 1), 6, (6, 6)).by_layer == ()
    shape = family.shape_of(config("mixtral"), (0, 1), 6, (4, 6))
    assert [shape.count(0), shape.count(1)] == [4, 6]


def test_an_infinity_as_transformers_writes_it(tmp_path: Path) -> None:
    """JSON has none, so that save_pretrained writes a tag in its place; Mamba's time steps have one."""
    import json

    wanted = config("granitemoehybrid", layer_types=["mamba", "attention"], mamba_n_heads=8, mamba_d_head=8)
    wanted.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert family.config_from_dict(fields).time_step_limit[1] == float("inf")


def test_the_language_model_of_a_whole_has_the_dtype_of_the_whole() -> None:
    fields = {"model_type": "qwen3_5_moe", "dtype": "bfloat16", "text_config": {"num_hidden_layers": 2}}
    found = family.config_from_dict(fields)
    assert found.model_type == "qwen3_5_moe_text"
    assert family.stored_dtype(found) is torch.bfloat16


def test_dense_layers_are_no_experts(tiny: Callable[..., Path]) -> None:
    from transformers import AutoConfig

    model = family.meta_model(AutoConfig.from_pretrained(tiny("qwen3_moe")), torch.float32)
    assert list(family.experts_modules(model)) == [0, 2]


def test_models_are_built_in_several_threads_at_once() -> None:
    """Transformers swaps settings of the whole process while it builds a model; they must be as before afterwards."""
    import sys
    import threading

    from transformers import MixtralConfig, PreTrainedModel

    before = torch.get_default_dtype(), PreTrainedModel.tie_weights, torch.nn.init.normal_
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    together = threading.Barrier(4)

    def build() -> None:
        together.wait(30)
        for _ in range(25):
            family.meta_model(config, torch.bfloat16)

    threads = [threading.Thread(target=build) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert (torch.get_default_dtype(), PreTrainedModel.tie_weights, torch.nn.init.normal_) == before

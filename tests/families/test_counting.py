"""Counts from a configuration alone against a model with real weights that has read a real prompt."""

from __future__ import annotations

from typing import Any

import torch

from checkpoint import family as families
from checkpoint import kv
from checkpoint.sizes.model_size import count

CONTEXT = 40
ENCODERS = (".vision_tower.", ".visual.")
"""Of images, which the cluster does not hold."""
NO_PASS_OVER_SHAPES = {"qwen4_exp_text"}
"""Its cache is taken for that of ordinary attention, which is more."""


def test_parameters_and_cache_are_those_of_the_real_model(family: str, tiny: Any) -> None:
    before = tiny.model.config._experts_implementation
    found = count(tiny.model.config, torch.float32, CONTEXT)
    assert tiny.model.config._experts_implementation == before
    cache = families.new_cache(tiny.model.config)
    with torch.inference_mode():
        tiny.model(input_ids=torch.zeros((1, CONTEXT), dtype=torch.int64), past_key_values=cache, use_cache=True)
    experts = sum(
        parameter.numel()
        for _, module in families.experts_modules(tiny.model).values()
        for parameter in families.expert_parameters("", module).values()
    )
    assert found.experts_all == experts
    text = [value for name, value in tiny.model.named_parameters() if not any(each in name for each in ENCODERS)]
    assert found.dense == sum(value.numel() for value in text) - experts
    real = kv.cache_bytes(cache)
    counted = found.cache * found.item_bytes
    assert counted > real if family in NO_PASS_OVER_SHAPES else counted == real

"""What is said of each family's shape, against what its own layers do in Transformers."""

from __future__ import annotations

from typing import Any

import torch

from checkpoint import family as families
from checkpoint import kv
from main_node.shape import model_shape
from support.models.families import features


def test_top_k_is_what_the_routers_choose(family: str, tiny: Any, record_property: Any) -> None:
    widths: dict[int, int] = {}
    modules = families.experts_modules(tiny.model)
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, layer=layer: widths.__setitem__(layer, args[1].shape[-1])  # type: ignore[misc]
        )
        for layer, (_, module) in modules.items()
    ]
    with torch.inference_mode():
        tiny.model(input_ids=torch.tensor([tiny.prompt]))
    for hook in hooks:
        hook.remove()
    shape = model_shape(tiny.store)
    assert widths.keys() == set(shape.layers)
    assert shape.top_k == max(widths.values())
    assert shape.experts == max(families.expert_count(module) for _, module in modules.values())
    record_property("features", ", ".join(features(tiny.model)))
    record_property("cache", ", ".join(kv.kinds(tiny.model.config)))

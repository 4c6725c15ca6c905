"""What is said of each family's shape, against what its own layers do in Transformers."""

from __future__ import annotations

from typing import Any

import torch

from checkpoint import family as families
from checkpoint import kv
from main_node.shape import model_shape


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


def features(model: Any) -> list[str]:
    """What this model has that a plain one has not, from its modules."""
    modules = [module for _, module in families.experts_modules(model).values()]
    names = [name for name, _ in model.named_parameters()]
    held = {
        "dense layers": len(modules) < model.config.get_text_config().num_hidden_layers,
        "shared experts": any("shared" in name for name in names),
        "biases": any(module.has_bias for module in modules),
        "transposed weights": any(module.is_transposed for module in modules),
        "interleaved gate": any(module.has_gate and not module.is_concatenated for module in modules),
        "no gate": not all(module.has_gate for module in modules),
        "latent attention": any("kv_a_proj" in name or "kv_b_proj" in name for name in names),
    }
    return [name for name, present in held.items() if present]

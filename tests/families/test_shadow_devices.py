"""A shadow of every family over two devices predicts what it predicts on one, and goes back in the same way."""

from __future__ import annotations

from typing import Any

import torch

from checkpoint import kv
from shadow_node.model import ShadowModel
from support.devices.counted_device import counted_device

AHEAD = [[12], [40]]


def predictions(model: ShadowModel, prompt: list[int]) -> tuple[list[Any], list[torch.Tensor]]:
    """The experts and weights at each gate and each pass's token, of a prompt, of passes ahead, and of those after the
    way back; and the cache in the end."""
    found: list[Any] = []
    model.on_routed = lambda *gate: found.append(gate)
    cache = model.new_cache()
    with torch.inference_mode():
        found.append(model.forward(prompt, cache))
        before = kv.mark(cache)
        found += [model.forward(tokens, cache) for tokens in AHEAD]
        kv.go_to(cache, before)
        found += [model.forward(tokens, cache) for tokens in reversed(AHEAD)]
    piece = kv.take(cache, 0, len(prompt) + len(AHEAD))
    return found, [tensor.cpu() for tensor in piece.tensors]


def test_two_devices_predict_as_one(tiny: Any) -> None:
    with counted_device() as (first, crossings):
        wanted, held = predictions(ShadowModel(tiny.store, "fp16", str(first)), tiny.prompt)
        over = ShadowModel(tiny.store, "fp16", f"{first.type}:0,{first.type}:1")
        crossings.clear()
        got, kept = predictions(over, tiny.prompt)
        crossed = crossings.by_asker("between devices")
    assert got == wanted
    assert all(map(torch.equal, kept, held))
    assert {parameter.device.index for parameter in over.dense.parameters()} == {0, 1}
    assert crossed.keys() == {"transfer.py:to_device"}

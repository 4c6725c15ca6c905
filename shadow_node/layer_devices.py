"""The shadow's layers over several devices of one kind: consecutive layers share one, and hidden states cross at the
cuts. KV rows and states lie beside their layers, since each layer makes its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from checkpoint.devices.names import accelerator_memory
from checkpoint.devices.transfer import to_device
from scheduler.planning.cuts import cut
from shadow_node.layer_stack import LayerStack, is_tied


class LayerDevices:
    """Of `model`, before it is quantised.

    `experts`: elements of all experts of each layer, which are quantised, too. The output head is on the last device,
    unless it is the embeddings, too. Everything else that is in no layer is on the first. Raises LaunchError for a
    model without a stack of layers.
    """

    def __init__(self, model: Any, devices: Sequence[torch.device], scheme: str, experts: Mapping[int, int]) -> None:
        self.devices = tuple(devices)
        self._stack = LayerStack(model) if len(devices) > 1 else None
        self._layers: list[torch.device] = []
        """The device of each layer."""
        head = model.get_output_embeddings()
        self._head = "" if is_tied(model) else next(n for n, module in model.named_modules() if module is head)
        if self._stack:
            last = sum(p.nbytes for p in head.parameters()) if self._head else 0
            sizes, rest = self._stack.sizes(model, scheme, experts)
            counts = cut(sizes, _rooms(self.devices), rest - last, last)
            self._layers = [d for d, count in zip(self.devices, counts, strict=True) for _ in range(count)]
            self._connect(list(self._stack.layers), head)

    def of(self, name: str) -> torch.device:
        """The device of the model's module of that name."""
        number = self._stack.number(name) if self._stack else None
        if number is not None:
            return self._layers[number]
        return self.devices[-1] if name == self._head else self.devices[0]

    def _connect(self, stack: Sequence[nn.Module], head: nn.Module) -> None:
        """Let what a layer is given come to its device, and what the last one gives go back to the first."""
        first = self.devices[0]
        held = _Held(first)
        for layer, device in zip(stack, self._layers, strict=True):
            is_cut = device != held.device
            held = _Held(device) if is_cut else held
            if device != first:
                layer.register_forward_pre_hook(held.given_first if is_cut else held.given, with_kwargs=True)
        if held.device != first:
            stack[-1].register_forward_hook(lambda _, __, output: _Held(first).moved(output))
        if self._head and self.devices[-1] != first:
            head.register_forward_pre_hook(_Held(self.devices[-1]).given_first, with_kwargs=True)


class _Held:
    """What the layers of one device are given: masks and positions come there once a pass, not once a layer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """id -> tensor elsewhere, the same here."""

    def given_first(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """As `given`, for the device's first layer."""
        self._known.clear()
        return self.given(module, args, kwargs)

    def given(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A pre-hook of a layer, whose arguments come to the device."""
        return self.moved(args), self.moved(kwargs)

    def moved(self, value: Any) -> Any:
        """Tensors, and those in tuples, lists and dictionaries, on the device."""
        if isinstance(value, torch.Tensor):
            return self._move(value)
        if isinstance(value, dict):
            return {key: self.moved(one) for key, one in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self.moved(one) for one in value)
        return value

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self.device:
            return tensor
        source, here = self._known.get(id(tensor), (None, tensor))
        if source is not tensor:
            (here,) = to_device(self.device, tensor)
            self._known[id(tensor)] = tensor, here
        return here


def _rooms(devices: Sequence[torch.device]) -> list[int]:
    """Free bytes of each; equal where torch does not know those of one."""
    rooms = [0 if device.type == "cpu" else accelerator_memory(device)[0] for device in devices]
    return rooms if all(rooms) else [1] * len(rooms)

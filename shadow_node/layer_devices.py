"""The shadow's layers over several devices of one kind: consecutive layers share one, and hidden states cross at the
cuts. KV rows and states lie beside their layers, since each layer makes its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from checkpoint import family
from checkpoint.devices.names import accelerator_memory
from checkpoint.devices.transfer import to_device
from scheduler.errors import LaunchError
from scheduler.planning.cuts import cut
from scheduler.planning.shadow_bytes import SHADOW_BYTES
from shadow_node.quantise import quantised_layers

_STACK = re.compile(r"(.+?)\.\d+\.")


class LayerDevices:
    """Of `model`, before it is quantised.

    `experts`: elements of all experts of each layer, which are quantised, too. The output head is on the last device,
    unless it is the embeddings, too. Everything else that is in no layer is on the first. Raises LaunchError for a
    model without a stack of layers.
    """

    def __init__(self, model: Any, devices: Sequence[torch.device], scheme: str, experts: Mapping[int, int]) -> None:
        self.devices = tuple(devices)
        self._prefix, stack = _stack(model) if len(devices) > 1 else ("", [])
        self._layers: list[torch.device] = []
        """The device of each layer."""
        head = model.get_output_embeddings()
        self._head = "" if _is_tied(model) else next(n for n, module in model.named_modules() if module is head)
        if stack:
            last = sum(p.nbytes for p in head.parameters()) if self._head else 0
            sizes, rest = self._sizes(model, scheme, experts)
            counts = cut(sizes, _rooms(self.devices), rest - last, last)
            self._layers = [d for d, count in zip(self.devices, counts, strict=True) for _ in range(count)]
            self._connect(stack, head)

    def _sizes(self, model: Any, scheme: str, experts: Mapping[int, int]) -> tuple[list[int], int]:
        """Bytes of each layer, once quantised, and of what is in none."""
        sizes, rest = dict[int, float](), 0
        quantised = quantised_layers(model)
        for name, parameter in model.named_parameters():
            number = self._layer_of(name)
            if number is None:
                rest += parameter.nbytes
            elif name.rpartition(".")[0] not in quantised:
                sizes[number] = sizes.get(number, 0) + parameter.nbytes
        for name, layer in quantised.items():
            if (number := self._layer_of(name)) is not None:
                elements = layer.in_features * layer.out_features
                sizes[number] = sizes.get(number, 0) + elements * SHADOW_BYTES[scheme].linear
        for number, elements in experts.items():
            sizes[number] = sizes.get(number, 0) + elements * SHADOW_BYTES[scheme].expert
        return [int(sizes[number]) for number in sorted(sizes)], rest

    def _layer_of(self, name: str) -> int | None:
        """The number of the layer that has the module or parameter of that name."""
        if not self._prefix or not name.startswith(f"{self._prefix}."):
            return None
        return int(name[len(self._prefix) + 1 :].partition(".")[0])

    def of(self, name: str) -> torch.device:
        """The device of the model's module of that name."""
        number = self._layer_of(name)
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


def _stack(model: Any) -> tuple[str, Sequence[nn.Module]]:
    """The name of the module that holds the layers, and those."""
    name = next(iter(family.experts_modules(model).values()))[0]
    match = _STACK.match(name)
    found = model.get_submodule(match.group(1)) if match else None
    if match is None or not isinstance(found, nn.ModuleList):
        raise LaunchError(
            f"{type(model).__name__} keeps its experts in {name}, in no list of layers that could be cut; give one "
            "--shadow-device"
        )
    return match.group(1), list(found)


def _is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _rooms(devices: Sequence[torch.device]) -> list[int]:
    """Free bytes of each; equal where torch does not know those of one."""
    rooms = [0 if device.type == "cpu" else accelerator_memory(device)[0] for device in devices]
    return rooms if all(rooms) else [1] * len(rooms)

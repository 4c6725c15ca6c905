"""The stack of a model's layers, and the bytes of each once it is quantised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from checkpoint import family
from scheduler.errors import LaunchError
from scheduler.planning.shadow_bytes import SHADOW_BYTES
from shadow_node.quantise import quantised_layers

_STACK = re.compile(r"(.+?)\.\d+\.")


class LayerStack:
    """Raises LaunchError for a model without a list of layers."""

    def __init__(self, model: Any) -> None:
        name = next(iter(family.experts_modules(model).values()))[0]
        match = _STACK.match(name)
        found = model.get_submodule(match.group(1)) if match else None
        if match is None or not isinstance(found, nn.ModuleList):
            raise LaunchError(
                f"{type(model).__name__} keeps its experts in {name}, in no list of layers that could be cut; give one "
                "--shadow-device, and --shadow-hosts 1"
            )
        self.layers = found
        self._prefix = match.group(1)

    def number(self, name: str) -> int | None:
        """Of the layer that has the module or parameter of that name."""
        if not name.startswith(f"{self._prefix}."):
            return None
        return int(name[len(self._prefix) + 1 :].partition(".")[0])

    def sizes(self, model: Any, scheme: str, experts: Mapping[int, int]) -> tuple[list[int], int]:
        """Bytes of each layer of `model`, once quantised, and of what is in none. `experts`: elements of all experts
        of each layer."""
        sizes, rest = [0.0] * len(self.layers), 0
        quantised = quantised_layers(model)
        for name, parameter in model.named_parameters():
            number = self.number(name)
            if number is None:
                rest += parameter.nbytes
            elif name.rpartition(".")[0] not in quantised:
                sizes[number] += parameter.nbytes
        for name, layer in quantised.items():
            if (number := self.number(name)) is not None:
                sizes[number] += layer.in_features * layer.out_features * SHADOW_BYTES[scheme].linear
        for number, elements in experts.items():
            sizes[number] += elements * SHADOW_BYTES[scheme].expert
        return list(map(int, sizes)), rest


def is_tied(model: Any) -> bool:
    """Whether the output head is the embeddings, too."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    return getattr(head, "weight", None) is getattr(embeddings, "weight", model)

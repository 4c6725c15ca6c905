"""Expert modules on views of weights, kept for the next computation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch

Module = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows [n, H], routing weights [n]) -> [n, H]."""


class ModuleCache:
    """The `capacity` modules that were used last: a few KiB each, since their parameters are views."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._modules: OrderedDict[tuple[int, int], Module] = OrderedDict()

    def get(self, key: tuple[int, int], bind: Callable[[], Module]) -> Module:
        """The module of `key`; made by `bind` where it is not there."""
        if key not in self._modules:
            self._modules[key] = bind()
        self._modules.move_to_end(key)
        if len(self._modules) > self._capacity:
            self._modules.popitem(last=False)
        return self._modules[key]

    def clear(self) -> None:
        self._modules.clear()

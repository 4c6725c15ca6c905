"""Expert modules on views of weights, kept for the next computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Module = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows [n, H], routing weights [n]) -> [n, H]."""


Kept = TypeVar("Kept", bound=Module)


class ModuleCache(Generic[Kept]):
    """The `capacity` modules that were used last: a few KiB each, since their parameters are views."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._modules: dict[tuple[int, int], Kept] = {}
        """The longest unused first."""

    def get(self, key: tuple[int, int], bind: Callable[[], Kept]) -> Kept:
        """The module of `key`; made by `bind` where it is not there."""
        module = self._modules.pop(key, None) or bind()  # another thread may clear or fill it meanwhile
        self._modules[key] = module
        if len(self._modules) > self._capacity:
            self._modules.pop(next(iter(self._modules), key), None)
        return module

    def clear(self) -> None:
        self._modules.clear()

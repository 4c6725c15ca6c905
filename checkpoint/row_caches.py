"""One KV cache for the rows of a block: each row reads a token of its own, one position after the row before.

The rows are forward passes of one token each that take turns at every layer, in their order. So a row finds in each
layer exactly what it would find alone. Only at its beginning, when the model makes masks and positions for all layers,
some layers do not have the rows before it yet: its view of the cache says how long they will be.
"""

from __future__ import annotations

import copy
from functools import cache as cached
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicIndexedLayer, DynamicLayer

from checkpoint.kv import attributes_now

_CROPPED = (DynamicLayer, DynamicIndexedLayer)
"""Cache layers that grow by a row a token and nothing else: Transformers' own `crop` takes rows off again."""


class RowCaches:
    """`position`: of the block's first row, so many tokens are in the cache. `rows`: of the block.

    `reached` is called whenever a row stops, in the order of the rows; `cut` once all have ended.
    """

    def __init__(self, cache: Any, position: int, rows: int) -> None:
        self._cache = cache
        self._position = position
        self._rows = rows
        self._kept: list[dict[int, dict[str, Any]]] = [{} for _ in range(rows)]
        """Row -> cache layer -> its attributes after that row, where it cannot be cropped."""
        self._states: list[dict[int, Any]] = [{} for _ in range(rows)]
        """Likewise, the states that are not in cache layers."""
        self._at = [-1] * rows
        """The layer whose gate each row has reached, and so has passed its attention."""
        self._uncropped = [number for number, layer in enumerate(cache.layers) if type(layer) not in _CROPPED]

    @property
    def in_turns(self) -> bool:
        """A row must not go on, within a layer, before the row before it has passed the layer: else what the cache was
        after that row is not known."""
        return bool(self._uncropped) or hasattr(self._cache, "linear_cache")

    def view(self, row: int) -> Any:
        """What the model is given as its cache for this row."""
        view = copy.copy(self._cache)
        view.__class__ = _row_class(type(self._cache))
        view.row_position = self._position + row
        return view

    def reached(self, row: int, layer: int | None) -> None:
        """A row has come to the gate of a layer; None: to its end."""
        if row + 1 == self._rows:  # nothing comes after it
            return
        first, self._at[row] = self._at[row], len(self._cache.layers) if layer is None else layer
        for number in self._uncropped:
            if first < number <= self._at[row]:
                self._kept[row][number] = attributes_now(self._cache.layers[number])
        for number, state in enumerate(getattr(self._cache, "linear_cache", ())):
            if first < number <= self._at[row]:
                self._states[row][number] = state.clone() if isinstance(state, torch.Tensor) else state

    def cut(self, rows: int) -> None:
        """Bring the cache to where it was after the first `rows` rows."""
        over = self._rows - rows
        if not over:
            return
        for layer in self._cache.layers:
            if type(layer) in _CROPPED:
                layer.crop(-over)
        for number, attributes in self._kept[rows - 1].items():
            own = vars(self._cache.layers[number])
            own.clear()
            own.update(attributes)
        for number, state in self._states[rows - 1].items():
            self._cache.linear_cache[number] = state


@cached
def _row_class(cls: Any) -> Any:
    """A cache class whose lengths are those that a row will find. Same name and module."""

    def get_seq_length(self: Any, layer_idx: int = 0) -> int:
        found: int = cls.get_seq_length(self, layer_idx)
        return max(found, self.row_position) if found else found

    def get_mask_sizes(self: Any, query_length: int, layer_idx: int) -> tuple[int, int]:
        sizes: tuple[int, int] = cls.get_mask_sizes(self, query_length, layer_idx)
        if layer_idx >= len(self.layers):
            return sizes
        layer = self.layers[layer_idx]
        if not isinstance(layer, CacheLayerMixin):
            layer = next(one for one in self.layers if isinstance(one, CacheLayerMixin))
        if not 0 < layer.get_seq_length() < self.row_position:
            return sizes
        return _at_length(layer, self.row_position).get_mask_sizes(query_length)  # type: ignore[no-any-return]

    methods = {"get_seq_length": get_seq_length, "get_mask_sizes": get_mask_sizes, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), methods)


def _at_length(layer: Any, length: int) -> Any:
    """A layer of so many tokens, for its sizes alone."""
    longer = copy.copy(layer)
    if hasattr(longer, "cumulative_length"):
        longer.cumulative_length = length
    else:
        longer.keys = layer.keys[..., :1, :].expand(*layer.keys.shape[:-2], length, layer.keys.shape[-1])
    return longer

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


Attributes = dict[tuple[str, Any], Any]
"""(Attribute, key where it is a dictionary, else None) -> value."""


class RowCaches:
    """`position`: of the block's first row, so many tokens are in the cache. `rows`: of the block.

    `on_resumed` is called before a row goes on from a gate, `on_reached` when it has stopped at the next or has ended;
    both row by row. `cut` is called once all have ended.
    """

    def __init__(self, cache: Any, position: int, rows: int) -> None:
        self._cache = cache
        self._position = position
        self._rows = rows
        self._kept: list[dict[int, Attributes]] = [{} for _ in range(rows)]
        """Row -> cache layer -> its attributes after that row, where it cannot be cropped."""
        self._before: Attributes = {}
        """Of the layer in which a row stopped, before it goes on."""
        self._behind: dict[int, set[tuple[str, Any]]] = {}
        """Cache layer -> attributes that rows change behind the layer's gate."""
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

    @property
    def nbytes(self) -> int:
        """Bytes of the states that are kept for the way back."""
        kept = [value for row in self._kept for layer in row.values() for value in layer.values()]
        kept += [value for row in self._states for value in row.values()]
        held = {id(layer.__dict__.get(name)) for layer in self._cache.layers for name in ("keys", "values")}
        tensors = {
            id(value): value.nbytes for value in kept if isinstance(value, torch.Tensor) and id(value) not in held
        }
        return sum(tensors.values())

    def view(self, row: int) -> Any:
        """What the model is given as its cache for this row."""
        return seen_at(self._cache, self._position + row)

    def on_resumed(self, row: int) -> None:
        """A row goes on from the gate at which it has stopped: what its layer changes behind the gate is found by
        comparison."""
        number = self._at[row]
        if row + 1 < self._rows and number in self._uncropped:
            self._before = _flat(attributes_now(self._cache.layers[number]))

    def on_reached(self, row: int, layer: int | None) -> None:
        """A row has come to the gate of a layer; None: to its end."""
        if row + 1 == self._rows:  # nothing comes after it
            return
        first, self._at[row] = self._at[row], len(self._cache.layers) if layer is None else layer
        for number in self._uncropped:
            if first < number <= self._at[row]:
                self._kept[row][number] = _flat(attributes_now(self._cache.layers[number]))
        if first in self._uncropped:
            self._keep_behind(row, first)
        for number, state in enumerate(getattr(self._cache, "linear_cache", ())):
            if first < number <= self._at[row]:
                self._states[row][number] = state.clone() if isinstance(state, torch.Tensor) else state

    def _keep_behind(self, row: int, number: int) -> None:
        """What a row has changed in a layer behind its gate. What a row before it has changed there counts, too: this
        row may have left it as it was."""
        now, behind = _flat(attributes_now(self._cache.layers[number])), self._behind.setdefault(number, set())
        behind |= {name for name, value in now.items() if not _same(value, self._before.get(name))}
        self._kept[row][number].update({name: now[name] for name in behind})

    def cut(self, rows: int) -> None:
        """Bring the cache to where it was after the first `rows` rows."""
        over = self._rows - rows
        if not over:
            return
        for layer in self._cache.layers:
            if type(layer) in _CROPPED:
                layer.crop(-over)
        for number, kept in self._kept[rows - 1].items():
            own = vars(self._cache.layers[number])
            for (name, key), value in kept.items():
                if key is None:
                    own[name] = value
                else:
                    own[name][key] = value
        for number, state in self._states[rows - 1].items():
            self._cache.linear_cache[number] = state


def seen_at(cache: Any, position: int) -> Any:
    """A view of a cache, as a row at `position` finds it: with so many tokens."""
    view = copy.copy(cache)
    kind: Any = type(cache)
    view.__class__ = _row_class(kind)
    view.row_position = position
    return view


def _flat(attributes: dict[str, Any]) -> Attributes:
    """A layer's attributes, with the values of dictionaries one by one."""
    found: Attributes = {}
    for name, value in attributes.items():
        if isinstance(value, dict):
            found |= {(name, key): one for key, one in value.items()}
        else:
            found[name, None] = value
    return found


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and not isinstance(one, torch.Tensor) and bool(one == other)


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

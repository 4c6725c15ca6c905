"""Blocks of a KV cache: what a cache has gained by some tokens, kept apart from it, and caches made of such blocks.

A block has the rows of its own positions. Of what is no row (states, compressed rows, counters) it has all that a pass
needs to go on from its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from checkpoint import family, kv
from checkpoint.devices.transfer import to_device, to_host
from scheduler.errors import UnsupportedFamilyError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Key = bytes
"""Of a block: the hash of its tokens and of the key of the block before it."""
Name = tuple[int, str]
"""Number of a cache's layer, and attribute of the layer."""


@dataclass(frozen=True, slots=True)
class KVBlock:
    """What the tokens at positions [start, stop) have added to a cache. Tensors are on the host."""

    start: int
    stop: int
    rows: dict[Name, torch.Tensor]
    """Of each tensor with a row a token, the rows of [start, stop), as far as the cache still had them at `stop`."""
    held: dict[Name, int]
    """How many rows the cache had of it at `stop`: fewer than `stop` in a sliding window."""
    rest: list[dict[str, Any]]
    """Every other attribute of each layer, at `stop`."""

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.rows.values()
        for value in itertools.chain.from_iterable(layer.values() for layer in self.rest):
            for one in value.values() if isinstance(value, dict) else (value,):
                if isinstance(one, torch.Tensor):
                    yield one


def why_not_kept(config: PreTrainedConfig) -> str:
    """Why blocks of this model's cache are not kept, in words; empty where they are."""
    try:
        kinds = kv.kinds(config)
        layers = family.new_cache(config).layers
    except UnsupportedFamilyError as error:
        return str(error)
    if any("indexer" in kind for kind in kinds):
        return (
            f"{config.model_type} keeps rows with an indexer: it takes those with the highest scores, of which many "
            "are equal, so that a prompt that is read in parts gives other tokens"
        )
    if not kv.continues(config):
        return (
            f"{config.model_type} begins its recurrences anew in each pass of several tokens, so that a prompt cannot "
            "be read in parts"
        )
    return "" if layers else f"{config.model_type} makes its cache's layers while it reads"


def are_rows_only(config: PreTrainedConfig) -> bool:
    """Whether a cache has nothing but rows that it never drops, so that it can be divided at any position."""
    return not why_not_kept(config) and kv.kinds(config) == ("rows",)


def take_block(cache: Any, start: int, stop: int) -> KVBlock:
    """The block of [start, stop), copied. The cache holds at least `stop` tokens, and exactly so many where it has
    more than rows; no pass is under way on it."""
    rows: dict[Name, torch.Tensor] = {}
    held: dict[Name, int] = {}
    rest: list[dict[str, Any]] = []
    with torch.inference_mode():
        for number, layer in enumerate(cache.layers):
            growing = kv.growing_of(layer)
            for name, kept in growing.items():
                rows[number, name] = kept.between(start, stop)
                held[number, name] = min(kept.count, stop - kept.first)
            rest.append({name: _copied(value) for name, value in vars(layer).items() if name not in growing})
        tensors = [tensor.clone() if tensor.is_cpu else tensor for tensor in rows.values()]
        rows = dict(zip(rows, to_host(*tensors) if tensors else (), strict=True))
    return KVBlock(start, stop, rows, held, rest)


def cache_of(config: PreTrainedConfig, blocks: Sequence[KVBlock], device: torch.device) -> Any:
    """A new cache with the tokens of `blocks`, which follow each other from position 0 on.

    Raises ValueError where they are not blocks of such a cache.
    """
    cache, last = family.new_cache(config), blocks[-1]
    if len(last.rest) != len(cache.layers):
        raise ValueError(f"blocks of {len(last.rest)} layers for a cache of {len(cache.layers)}")
    with torch.inference_mode():
        for number, layer in enumerate(cache.layers):
            for name, value in last.rest[number].items():
                setattr(layer, name, _copied(value, device))
            for kept in [kept for kept in last.held if kept[0] == number]:
                setattr(layer, kept[1], _joined(blocks, kept, device))
    return cache


def _joined(blocks: Sequence[KVBlock], name: Name, device: torch.device) -> torch.Tensor:
    """The last rows of a tensor, as many as the cache held of it."""
    axis, count = kv.row_axis(name[1]), blocks[-1].held[name]
    parts: list[torch.Tensor] = []
    left = count
    for block in reversed(blocks):
        part = block.rows[name]
        have = min(part.shape[axis], left)
        parts.insert(0, part.narrow(axis, part.shape[axis] - have, have))
        left -= have
        if not left or have < block.stop - block.start:
            break
    if left:
        raise ValueError(f"{name[1]} of layer {name[0]} lacks {left} of its {count} rows")
    return to_device(device, torch.cat(parts, dim=axis))[0]


def _copied(value: Any, device: torch.device | None = None) -> Any:
    """A copy of an attribute. Tensors come to the host, or to `device`."""
    if isinstance(value, torch.Tensor):
        (moved,) = to_host(value) if device is None else to_device(device, value)
        return moved.clone() if moved is value else moved
    if isinstance(value, dict):
        return {key: _copied(one, device) for key, one in value.items()}
    return list(value) if isinstance(value, list) else value

"""KV alignment: copies rows and states from one cache into another of the same model.

Both sides find the same tensors in their own caches, in the same order: first each layer's tensors that grow by a row a
token (keys, values, an indexer's keys), then each layer's states (of convolutions and recurrences, compressed rows).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from checkpoint import family
from checkpoint.devices.transfer import to_device, to_host
from scheduler.errors import ProtocolError, UnsupportedFamilyError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_GROWING = (("keys", -2), ("values", -2), ("indexer_keys", 1), ("idx_keys", -2))
"""Attributes of Transformers' cache layers that grow by a row a token, and the axis of their rows. (An indexer's
positions are the same on both sides.)"""

_STATES = (
    *("conv_states", "recurrent_states"),
    *("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate"),
)
"""Dictionaries of tensors whose shapes follow from the position alone; each is copied whole."""

_KINDS = {
    "DynamicLayer": "rows",
    "DynamicSlidingWindowLayer": "sliding window",
    "DynamicIndexedLayer": "rows with an indexer",
    "MiniMaxM3VLSparseCacheLayer": "rows with an indexer",
    "DeepseekV4HCACache": "sliding window, compressed",
    "DeepseekV4CSACache": "sliding window, compressed",
    "LinearAttentionLayer": "states",
    "LinearAttentionAndFullAttentionLayer": "rows and states",
    "LinearAttentionAndSlidingWindowAttentionLayer": "sliding window and states",
    "DummyLayer": "",
}


def kinds(config: PreTrainedConfig) -> tuple[str, ...]:
    """The kinds of layers of this model's cache, each once.

    Raises UnsupportedFamilyError for a kind that cannot be aligned.
    """
    cache = family.new_cache(config)
    found = {"rows"} if not cache.layers else set()
    if hasattr(cache, "linear_cache"):
        found.add("states")
    for layer in cache.layers:
        name = type(layer).__name__
        if name not in _KINDS:
            raise UnsupportedFamilyError(
                f"the cache of {config.model_type} has layers ({name}) that KV alignment does not know; "
                "give --align-kv 0, or --shadow none"
            )
        found.add(_KINDS[name])
    return tuple(sorted(found - {""}))


_STATES_CONTINUED = {
    *("bailing_hybrid", "granitemoehybrid", "inkling_text", "inkling2_text", "kimi_linear", "lfm2_moe", "nemotron_h"),
    *("qwen3_next", "qwen3_5_moe_text", "zaya"),
}
"""Families whose convolutions and recurrences go on from the cache in a pass of several tokens. In others (Jamba,
MiniMax) such a pass begins from nothing, whatever the cache holds."""


def continues(config: PreTrainedConfig) -> bool:
    """Whether a prompt may be read in chunks: a pass of several tokens goes on from what the cache holds.

    Not so with an indexer, which takes the rows with the highest scores: many are equal, and rounding decides.
    """
    try:
        found = kinds(config)
    except UnsupportedFamilyError:
        return False
    if any("indexer" in kind for kind in found):
        return False
    return config.get_text_config().model_type in _STATES_CONTINUED or not any("states" in kind for kind in found)


_LINEAR = {"rows", "rows with an indexer", "states", "rows and states"}


def is_linear(config: PreTrainedConfig) -> bool:
    """Whether every token adds the same number of bytes to this model's cache, and states do not grow."""
    try:
        return _LINEAR.issuperset(kinds(config))
    except UnsupportedFamilyError:
        return False


@dataclass(frozen=True, slots=True)
class Growing:
    """A tensor with a row a token along `axis`, of the positions [first, first + count).

    A `whole` tensor never drops rows, so its `first` is 0.
    """

    tensor: torch.Tensor
    axis: int
    first: int = 0
    whole: bool = True

    @property
    def count(self) -> int:
        return self.tensor.shape[self.axis]

    def between(self, start: int, stop: int) -> torch.Tensor:
        """A view of the rows of [start, stop) that the cache still has."""
        low, high = max(start, self.first), min(stop, self.first + self.count)
        return self.tensor.narrow(self.axis, low - self.first if low < high else 0, max(0, high - low))


@dataclass(frozen=True, slots=True)
class CachePiece:
    """Rows [start, stop) of a cache, as far as it still has them, and its states."""

    start: int
    stop: int
    rows: list[Growing] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*(row.tensor for row in self.rows), *self.states]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def parts(self, part_bytes: int) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """(position of the first row, all tensors of the cache), in pieces of about `part_bytes` with at least one row
        or state each. A tensor that a piece does not contain has shape [0]."""
        nothing = [tensor.new_empty(0) for tensor in self.tensors]
        pieces: list[tuple[int, list[torch.Tensor]]] = []
        first = max(self.start, min((r.first for r in self.rows if r.count), default=self.stop))
        row_bytes = sum(r.tensor.nbytes // r.count for r in self.rows if r.count)
        each = max(1, part_bytes // max(row_bytes, 1))
        for at in range(first, self.stop, each):
            end = min(at + each, self.stop)
            piece = nothing.copy()
            for number, row in enumerate(self.rows):
                if row.first < end and row.count:
                    piece[number] = row.between(at, end)
            pieces.append((at, piece))
        for number, state in enumerate(self.states, len(self.rows)):
            if not pieces or sum(t.nbytes for t in pieces[-1][1]) + state.nbytes > part_bytes:
                pieces.append((self.stop, nothing.copy()))
            pieces[-1][1][number] = state
        yield from pieces


def take(cache: Any, start: int, stop: int, resting: bool = True, states: bool = True) -> CachePiece:
    """The rows of positions [start, stop) and, with `states`, the states at `stop`; nothing if start == stop.

    `resting` means between passes. During a pass a layer may already be a token ahead, so only tensors that never drop
    rows are taken. States are copied, since later passes overwrite them.
    """
    if start == stop:
        return CachePiece(start, stop)
    rows = []
    for kept in _growing(cache):
        held = kept.between(start if kept.whole or resting else stop, stop)
        rows.append(Growing(held, kept.axis, stop - held.shape[kept.axis], kept.whole))
    return CachePiece(start, stop, rows, [state.clone() for state in _states(cache)] if resting and states else [])


def put(cache: Any, start: int, sent: list[torch.Tensor]) -> int:
    """Write one piece, rows from position `start` on. Returns the position after the last row.

    Raises ProtocolError, with nothing written, if the tensors do not fit this cache.
    """
    rows, states = _growing(cache), _states(cache)
    if len(sent) not in (len(rows) + len(states), len(rows)):
        raise ProtocolError(f"alignment has {len(sent)} KV tensors; this model's cache has {len(rows) + len(states)}")
    counts = [t.shape[r.axis] if t.dim() == r.tensor.dim() else 0 for r, t in zip(rows, sent, strict=False)]
    stop = start + max(counts, default=0)
    places: list[torch.Tensor] = []
    for kept, tensor in zip(rows, sent, strict=False):
        place = kept.between(start, stop)
        _check(place, tensor, start, optional=stop == start or not kept.whole)
        places.append(place)
    for state, tensor in zip(states, sent[len(rows) :], strict=False):
        _check(state, tensor, start, optional=True)
        places.append(state)
    _write(places, sent)
    return stop


def take_over(cache: Any, start: int, sent: list[torch.Tensor]) -> int:
    """As `put`, but between two layers of a pass, which has moved windows on in some layers: of these, the rows that
    are left are written. A cache takes no states over, see `has_states`.

    Raises ProtocolError, with nothing written, if the tensors do not fit this cache.
    """
    rows = _growing(cache)
    if len(sent) != len(rows):
        raise ProtocolError(f"alignment has {len(sent)} KV tensors; this model's cache has {len(rows)}")
    stop = start + max(
        (t.shape[r.axis] for r, t in zip(rows, sent, strict=True) if t.dim() == r.tensor.dim()), default=0
    )
    places, kept_rows = [], []
    for kept, tensor in zip(rows, sent, strict=True):
        if not kept.whole and tensor.dim() == kept.tensor.dim():
            first = stop - tensor.shape[kept.axis]
            place = kept.between(first, stop)
            gone = min(max(kept.first - first, 0), tensor.shape[kept.axis])
            tensor = tensor.narrow(kept.axis, gone, tensor.shape[kept.axis] - gone)
        else:
            place = kept.between(start, stop)
        _check(place, tensor, start, optional=stop == start or not kept.whole)
        places.append(place)
        kept_rows.append(tensor)
    _write(places, kept_rows)
    return stop


def _write(places: list[torch.Tensor], sent: list[torch.Tensor]) -> None:
    """Tensors of another device than the cache's come there in one copy, for each of the cache's devices."""
    by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for place, tensor in zip(places, sent, strict=True):
        if tensor.numel():
            by_device.setdefault(place.device, []).append((place, tensor))
    for device, used in by_device.items():
        tensors = [tensor for _, tensor in used]
        arrived = to_host(*tensors) if device.type == "cpu" else to_device(device, *tensors)
        with torch.inference_mode():
            for (place, _), tensor in zip(used, arrived, strict=True):
                place.copy_(tensor)


def has_states(cache: Any, sent: Iterable[Any]) -> bool:
    """Whether there are states, which are of one position only, among the tensors that were sent for this cache."""
    return bool(_states(cache)) and any(tensor.shape != (0,) for tensor in list(sent)[len(_growing(cache)) :])


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of a cache, in their order."""

    axes: tuple[int, ...] = ()
    """Of each tensor with a row a token, the axis of its rows."""
    states: int = 0
    """The number of the others."""


def layout(cache: Any) -> Layout:
    """Known once a pass has run."""
    return Layout(tuple(kept.axis % kept.tensor.dim() for kept in _growing(cache)), len(_states(cache)))


@dataclass(frozen=True, slots=True)
class Layers:
    """Some layers of a cache, for the functions that read and write rows."""

    layers: list[Any]
    linear_cache: list[Any]


def layers_of(cache: Any, first: int, stop: int) -> Layers:
    """The layers [first, stop) of a cache."""
    return Layers(cache.layers[first:stop], list(getattr(cache, "linear_cache", ()))[first:stop])


def state_bytes(cache: Any) -> int:
    """Bytes of all states."""
    return sum(state.nbytes for state in _states(cache))


@dataclass(frozen=True, slots=True)
class Mark:
    """What a cache needs to go back, once, to where it was: see `mark`."""

    layers: list[dict[str, Any]]
    """The attributes of each layer, of a tensor that grows the number of its rows."""
    states: list[Any] | None

    @property
    def nbytes(self) -> int:
        """Bytes that it holds itself."""
        held = itertools.chain((value for layer in self.layers for value in layer.values()), self.states or ())
        tensors = [t for value in held for t in (value.values() if isinstance(value, dict) else [value])]
        return sum({id(t): t.nbytes for t in tensors if isinstance(t, torch.Tensor)}.values())


def mark(cache: Any, rows: bool = False) -> Mark:
    """Marks the cache's present end, between two passes.

    Rows are only counted, and cut off on the way back; windows, states and compressed rows are copied. `rows`: to go
    forward again to this end after the cache went back, the rows are kept, too.
    """
    with torch.inference_mode():
        states = getattr(cache, "linear_cache", None)
        return Mark(
            [_attributes(layer, rows) for layer in cache.layers],
            None if states is None else [_copy_tensors(state, {}) for state in states],
        )


def go_to(cache: Any, to: Mark) -> None:
    """Bring the cache to a mark's end. The mark is used up."""
    del cache.layers[len(to.layers) :]
    for layer, kept in zip(cache.layers, to.layers, strict=True):
        own = vars(layer)
        for name in own.keys() - kept.keys():
            del own[name]
        for name, value in kept.items():
            own[name] = value.cut(own[name]) if isinstance(value, _Cut) else value
    if to.states is not None:
        cache.linear_cache[:] = to.states


@dataclass(frozen=True, slots=True)
class _Cut:
    """A tensor that grows, cut off after `count` rows."""

    axis: int
    count: int

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(self.axis, 0, self.count)


def _attributes(layer: Any, rows: bool) -> dict[str, Any]:
    growing = {} if getattr(layer, "is_sliding", False) else dict(_GROWING)
    copies: dict[int, torch.Tensor] = {}  # one tensor may be two attributes
    kept: dict[str, Any] = {}
    for name, value in vars(layer).items():
        if name in growing and isinstance(value, torch.Tensor):
            whole = rows or value.dim() < 2  # an empty one has no axis yet
            kept[name] = value if whole else _Cut(growing[name], value.shape[growing[name]])
        else:
            kept[name] = _copy_tensors(value, copies)
    return kept


def attributes_now(layer: Any) -> dict[str, Any]:
    """All attributes of a cache's layer, for a way back to where it is now: states are copied. Tensors with a row a
    token are not: passes replace them, and write to none."""
    rows, copies = {name for name, _ in _GROWING}, dict[int, torch.Tensor]()
    return {name: value if name in rows else _copy_tensors(value, copies) for name, value in vars(layer).items()}


def _copy_tensors(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return copies.setdefault(id(value), value.clone())
    if isinstance(value, dict):
        return {key: _copy_tensors(one, copies) for key, one in value.items()}
    return list(value) if isinstance(value, list) else value


def cache_bytes(cache: Any) -> int:
    """Bytes of everything in a cache."""
    return sum(t.nbytes for t in itertools.chain((r.tensor for r in _growing(cache)), _states(cache)))


def _check(place: torch.Tensor, sent: torch.Tensor, start: int, optional: bool) -> None:
    if optional and sent.shape == (0,):
        return
    if place.shape != sent.shape:
        raise ProtocolError(
            f"alignment has KV rows of shape {tuple(sent.shape)} from position {start} on; "
            f"the shadow holds {tuple(place.shape)} there"
        )


def _growing(cache: Any) -> list[Growing]:
    return [kept for layer in cache.layers for kept in growing_of(layer).values()]


def growing_of(layer: Any) -> dict[str, Growing]:
    """A cache layer's tensors that grow by a row a token, by attribute."""
    sliding, found = getattr(layer, "is_sliding", False), {}
    for name, axis in _GROWING:
        tensor = getattr(layer, name, None)
        if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:  # an empty one has no axis yet
            first = layer.get_seq_length() - tensor.shape[axis] if sliding else 0
            found[name] = Growing(tensor, axis, first, not sliding)
    return found


def row_axis(name: str) -> int:
    """The axis along which an attribute of `growing_of` grows."""
    return dict(_GROWING)[name]


def _states(cache: Any) -> list[torch.Tensor]:
    found = []
    for layer in cache.layers:
        for name in _STATES:
            found += [state for _, state in sorted(getattr(layer, name, {}).items()) if state is not None]
    found += [state for state in getattr(cache, "linear_cache", ()) if isinstance(state, torch.Tensor)]
    return found

"""Facts in, commands out: the vocabulary of the scheduler. Times are seconds on whatever clock the caller keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar, dataclass_transform

_T = TypeVar("_T")
_PAGE = 4096


class ExpertId(NamedTuple):
    """An expert: the model's layer index and its number in that layer."""

    layer: int
    expert: int


class Visit(NamedTuple):
    """One pass through one MoE layer. `position`: of the pass's first token in the request."""

    request: int
    position: int
    layer: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What must be known of a model. `layers`: the indices of its MoE layers, ascending. `experts`: the largest E of
    any layer; `by_layer`: E of each layer, where they are not all the same. `hidden`: H, elements of one embedding.
    `context`: the most tokens, prompt and answer together."""

    layers: tuple[int, ...]
    experts: int
    top_k: int
    hidden: int = 0
    context: int = 1 << 30
    by_layer: tuple[int, ...] = ()

    def count(self, ordinal: int) -> int:
        """E of the `ordinal`-th MoE layer."""
        return self.by_layer[ordinal] if self.by_layer else self.experts


@dataclass(frozen=True, slots=True)
class ModelSize:
    """How large a model is: numbers of elements, of all layers together unless noted."""

    name: str
    """For people, with family and dtype."""
    dtype: str
    item_bytes: int
    depth: int
    """Layers of any kind."""
    layers: int
    """Layers with experts."""
    experts: int
    """Of the layer that has most."""
    top_k: int
    hidden: int
    expert: int
    """One expert, the largest."""
    experts_all: int
    dense: int
    """All that is not an expert."""
    read: int
    """Of `dense`, what one token's pass reads: not the input embeddings, unless they are the head as well."""
    linear: int
    """Of `dense`, what a quantised shadow quantises."""
    cache_token: int
    """Keys, values and states after one token."""
    cache: int
    """The same after `context` tokens."""
    context: int
    context_max: int
    """The model's own limit."""

    @property
    def expert_bytes(self) -> int:
        """One expert's, as it travels: a slot, and a blob of the store, are whole pages."""
        return -(-self.expert * self.item_bytes // _PAGE) * _PAGE


@dataclass_transform(frozen_default=True)
def _message(cls: type[_T]) -> type[_T]:
    """Facts and commands are never changed; mypy sees to it, since a frozen dataclass takes five times as long to make,
    and hundreds are made for every token."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


# --- events: what happened --------------------------------------------------------------------------------------


@_message
class WorkerJoined:
    """A worker with no `slots` is a host place: it computes any expert where it lies, without a load.

    `load_s`: one expert's load; `call_s`, `row_s`: a computation, for each call and for each of its rows. Seconds, as
    measured or as a profile has them; 0 where nobody knows.
    """

    worker: int
    slots: int
    load_s: float = 0.0
    call_s: float = 0.0
    row_s: float = 0.0


@_message
class WorkerLost:
    worker: int
    reason: str


@_message
class ShadowJoined:
    """The shadow can follow requests from now on."""


@_message
class ShadowLost:
    """No more predictions; requests go on without."""


@_message
class RequestOpened:
    request: int
    prompt_tokens: int


@_message
class RequestClosed:
    request: int


@_message
class PassStarted:
    """The main model begins a forward pass over `tokens` tokens from `position` on."""

    request: int
    position: int
    tokens: int
    prefill: bool


@_message
class Predicted:
    """The shadow routed the token at `position`: experts of `layer`, best first."""

    request: int
    position: int
    layer: int
    experts: tuple[int, ...]


@_message
class GateFired:
    """The main model's gate: (expert, rows) of `layer`, ascending by expert, rows > 0.

    Where the scheduler wants scores (`Strategy.wants_scores`): `chosen`, for each row the experts that the gate chose,
    best first; `scores`, for each row the score of every expert, as the routing weights are proportional to them.
    """

    visit: Visit
    rows: tuple[tuple[int, int], ...]
    chosen: tuple[tuple[int, ...], ...] = ()
    scores: tuple[tuple[float, ...], ...] = ()


@_message
class Foreseen:
    """For each row, the scores that the gate of a visit still to come is expected to give every expert."""

    request: int
    position: int
    layer: int
    scores: tuple[tuple[float, ...], ...]


@_message
class LoadEnded:
    load_id: int
    nbytes: int = 0


@_message
class LoadFailed:
    load_id: int
    reason: str


@_message
class ComputeEnded:
    call_id: int


@_message
class ComputeFailed:
    call_id: int
    reason: str


@_message
class TokenDecoded:
    """Token number `index` of the answer (0: prefill's) exists; decode pass `index` will read it."""

    request: int
    index: int


Event = (
    WorkerJoined | WorkerLost | ShadowJoined | ShadowLost | RequestOpened | RequestClosed | PassStarted
    | Predicted | GateFired | Foreseen | LoadEnded | LoadFailed | ComputeEnded | ComputeFailed | TokenDecoded
)  # fmt: skip

# --- commands: what to do ---------------------------------------------------------------------------------------


@_message
class Route:
    """Before anything of this visit is computed. `experts`: for each row those that compute it, in place of the gate's;
    empty where the gate's stand. `resident`: named ones whose bytes are in a slot already."""

    visit: Visit
    experts: tuple[tuple[int, ...], ...]
    resident: tuple[int, ...]


@_message
class Load:
    """Start loading; the slot is free. Ends in LoadEnded or LoadFailed, unless an Evict of the slot comes first.

    `form`: in which of the store's forms; empty: the full one."""

    worker: int
    slot: int
    expert: ExpertId
    load_id: int
    form: str = ""


@_message
class Evict:
    """Free the slot at once, given up if still loading."""

    worker: int
    slot: int
    expert: ExpertId


@_message
class Compute:
    """Send rows [start, stop) of the expert's share; the worker runs them when its load has ended.

    `evict`: the slot is free once this has been computed. A host place has no slots: `slot` is 0, `evict` False.
    """

    worker: int
    slot: int
    expert: ExpertId
    call_id: int
    visit: Visit
    start: int
    stop: int
    evict: bool


@_message
class Resume:
    """Every expert of this visit has been computed: the main model goes on."""

    visit: Visit


@_message
class Follow:
    """The shadow is to follow the request: it prefills all tokens before decode pass `step` and goes on from there."""

    request: int
    step: int


@_message
class Align:
    """Tell the shadow that decode pass `step` may start, with the main model's token where `token`, and with the
    main model's KV rows of positions [kv_start, kv_stop), none where equal."""

    request: int
    step: int
    token: bool
    kv_start: int
    kv_stop: int


@_message
class Unfollow:
    """The shadow is to forget the request."""

    request: int


@_message
class Fail:
    """The request cannot go on."""

    request: int
    reason: str


Command = Route | Load | Evict | Compute | Resume | Follow | Align | Unfollow | Fail

"""Facts in, commands out: the vocabulary of the scheduler. Times are seconds on whatever clock the caller keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar, dataclass_transform

_T = TypeVar("_T")


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


@dataclass_transform(frozen_default=True)
def _said(cls: type[_T]) -> type[_T]:
    """Facts and commands are never changed; mypy sees to it, since a frozen dataclass takes five times as long to make,
    and hundreds are made for every token."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


# --- events: what happened --------------------------------------------------------------------------------------


@_said
class WorkerJoined:
    worker: int
    slots: int


@_said
class WorkerLost:
    worker: int
    reason: str


@_said
class ShadowJoined:
    """The shadow can follow requests from now on."""


@_said
class ShadowLost:
    """No more predictions; requests go on without."""


@_said
class RequestOpened:
    request: int
    prompt_tokens: int


@_said
class RequestClosed:
    request: int


@_said
class PassStarted:
    """The main model begins a forward pass over `tokens` tokens from `position` on."""

    request: int
    position: int
    tokens: int
    prefill: bool


@_said
class Predicted:
    """The shadow routed the token at `position`: experts of `layer`, best first."""

    request: int
    position: int
    layer: int
    experts: tuple[int, ...]


@_said
class GateFired:
    """The main model's gate: (expert, rows) of `layer`, ascending by expert, rows > 0."""

    visit: Visit
    rows: tuple[tuple[int, int], ...]


@_said
class LoadEnded:
    load_id: int
    nbytes: int = 0


@_said
class LoadFailed:
    load_id: int
    reason: str


@_said
class ComputeEnded:
    call_id: int


@_said
class ComputeFailed:
    call_id: int
    reason: str


@_said
class TokenDecoded:
    """Token number `index` of the answer (0: prefill's) exists; decode pass `index` will read it."""

    request: int
    index: int


Event = (
    WorkerJoined | WorkerLost | ShadowJoined | ShadowLost | RequestOpened | RequestClosed | PassStarted
    | Predicted | GateFired | LoadEnded | LoadFailed | ComputeEnded | ComputeFailed | TokenDecoded
)  # fmt: skip

# --- commands: what to do ---------------------------------------------------------------------------------------


@_said
class Load:
    """Start loading; the slot is free. Ends in LoadEnded or LoadFailed, unless an Evict of the slot comes first."""

    worker: int
    slot: int
    expert: ExpertId
    load_id: int


@_said
class Evict:
    """Free the slot at once, given up if still loading."""

    worker: int
    slot: int
    expert: ExpertId


@_said
class Compute:
    """Send rows [start, stop) of the expert's share; the worker runs them when its load has ended.

    `evict`: the slot is free once this has been computed.
    """

    worker: int
    slot: int
    expert: ExpertId
    call_id: int
    visit: Visit
    start: int
    stop: int
    evict: bool


@_said
class Resume:
    """Every expert of this visit has been computed: the main model goes on."""

    visit: Visit


@_said
class Follow:
    """The shadow is to follow the request: it prefills all tokens before decode pass `step` and goes on from there."""

    request: int
    step: int


@_said
class Align:
    """Tell the shadow that decode pass `step` may start, with the main model's token where `token`, and with the
    main model's KV rows of positions [kv_start, kv_stop), none where equal."""

    request: int
    step: int
    token: bool
    kv_start: int
    kv_stop: int


@_said
class Unfollow:
    """The shadow is to forget the request."""

    request: int


@_said
class Fail:
    """The request cannot go on."""

    request: int
    reason: str


Command = Load | Evict | Compute | Resume | Follow | Align | Unfollow | Fail

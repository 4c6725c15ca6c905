"""Facts in, commands out: the vocabulary of the scheduler. Times are seconds on whatever clock the caller keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, dataclass_transform

_T = TypeVar("_T")
PAGE = 4096
"""Bytes: O_DIRECT reads whole pages, and so does a blob of a store begin and end with one."""


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
    """The facts of a model that the scheduler needs."""

    layers: tuple[int, ...]
    """The indices of the MoE layers, ascending."""
    experts: int
    """The number of experts of a layer, E; the largest one if layers differ."""
    top_k: int
    hidden: int = 0
    """Elements of one embedding, H."""
    context: int = 1 << 30
    """Maximum number of tokens, prompt and answer together."""
    by_layer: tuple[int, ...] = ()
    """E of each layer; empty if it is the same in all layers."""

    def count(self, ordinal: int) -> int:
        """E of the `ordinal`-th MoE layer."""
        return self.by_layer[ordinal] if self.by_layer else self.experts


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of a model, in numbers of elements, of all layers together unless noted."""

    name: str
    """For people, with family and dtype."""
    dtype: str
    item_bytes: int
    depth: int
    """Layers of any kind."""
    layers: int
    """Layers with experts."""
    experts: int
    """Experts of the layer with the most."""
    top_k: int
    hidden: int
    expert: int
    """The largest expert."""
    experts_all: int
    dense: int
    """Everything except experts."""
    read: int
    """The part of `dense` that a pass over one token reads. It has the input embeddings only if they are the head,
    too."""
    linear: int
    """The part of `dense` that the shadow quantises."""
    cache_token: int
    """Keys and values of one token."""
    cache: int
    """Keys, values and states after `context` tokens."""
    context: int
    context_max: int
    """The model's own limit."""
    state: int = 0
    """States of convolutions and recurrences, as large after one token as after many."""
    native_bits: float = 0.0
    """Bits of an element of an expert in the store, scales included, where it keeps them as published; 0 elsewhere."""
    dense_saved: int = 0
    """Bytes that the dense part takes less on the main node because its linear layers are kept in few bits."""
    restoring_scratch: int = 0
    """Bytes of working memory of a worker that restores experts before it computes them; 0 elsewhere."""
    head: int = 0
    """Of the model's own multi-token-prediction layer, with its experts, which the weights may have. It is part of
    nothing else: only `--draft-from mtp` loads it."""

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense part on the main node."""
        return self.dense * self.item_bytes - self.dense_saved

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in a slot and in a blob of the store, both in whole pages: what a load moves."""
        return -(-math.ceil(self.expert * self._stored_bytes) // PAGE) * PAGE

    @property
    def restoring_bytes(self) -> int:
        """Bytes that a worker needs beside its slots to restore an expert: the expert's own, and working memory. 0
        where nothing is restored."""
        return self.restored_bytes + self.restoring_scratch

    @property
    def restored_bytes(self) -> int:
        """Bytes of one expert when it is computed, in whole pages, where a worker restores it first; 0 elsewhere."""
        return -(-self.expert * self.item_bytes // PAGE) * PAGE if self.native_bits else 0

    @property
    def store_bytes(self) -> int:
        """Bytes of all experts in a store."""
        return math.ceil(self.experts_all * self._stored_bytes)

    @property
    def _stored_bytes(self) -> float:
        return self.native_bits / 8 if self.native_bits else self.item_bytes


@dataclass_transform(frozen_default=True)
def _message(cls: type[_T]) -> type[_T]:
    """A dataclass that only mypy treats as frozen. Creating a really frozen one takes five times as long, and every
    token creates hundreds."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


# --- events: what happened --------------------------------------------------------------------------------------


class FormCost(NamedTuple):
    """What one form of an expert costs on a worker."""

    form: str
    """Empty for the full one."""
    load_s: float
    """Seconds to load it."""
    restore_s: float
    """Seconds to restore it for a computation; 0 for the full form."""
    fits: bool
    """The worker has slots, and memory to restore it, for this form."""


class HeldRange(NamedTuple):
    """Experts `first` to `last` of a layer, both included."""

    layer: int
    first: int
    last: int


@_message
class WorkerJoined:
    """A worker with no `slots` is a host place: it computes any expert where it lies, without a load.

    `load_s`: one expert's load; `call_s`, `row_s`: a computation, for each call and for each of its rows. Seconds, as
    measured or as a profile has them; 0 if unknown. `forms`: the full form and those of the precision; empty where
    their costs are unknown, or where the precision's forms are loaded whatever they cost. `held`: the experts of its
    part of the store; None: all.

    `host_slots`: room for so many experts in host memory, between disk and slots. `load_s` is then from disk, through
    host memory into the slot, and `host_load_s` from host memory into the slot.
    """

    worker: int
    slots: int
    load_s: float = 0.0
    call_s: float = 0.0
    row_s: float = 0.0
    forms: tuple[FormCost, ...] = ()
    host_slots: int = 0
    host_load_s: float = 0.0
    held: tuple[HeldRange, ...] | None = None


@_message
class HoldingsChanged:
    """The worker's part of the store has other experts than before; None: all."""

    worker: int
    held: tuple[HeldRange, ...] | None


@_message
class WorkerLost:
    worker: int
    reason: str


@_message
class HostMemoryShrunk:
    """The worker's machine ran short of memory: only the first `host_slots` of its host slots are left."""

    worker: int
    host_slots: int


@_message
class ShadowJoined:
    """The shadow can follow requests from now on."""


@_message
class ShadowLost:
    """There are no more predictions; requests go on without them."""


@_message
class RequestOpened:
    request: int
    prompt_tokens: int


@_message
class RequestClosed:
    """`tokens`: of its answer so far; 0: none, or unknown. For recordings."""

    request: int
    tokens: int = 0


class Pass(NamedTuple):
    """A forward pass of the main model for one request: `tokens` tokens from `position` on."""

    request: int
    position: int
    tokens: int
    prefill: bool
    """It reads tokens of the prompt: all, or a chunk of them; or once more all tokens so far, where the model's own
    generation does. A pass in decoding reads a token, or a block of them."""


@_message
class StepStarted:
    """The main model begins a step: a pass for each of these requests, all different.

    A layer's gates count as fired once those of all passes have, so that their demands are united. A request that is
    closed leaves the step.
    """

    passes: tuple[Pass, ...]


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

    In a block, and if the scheduler needs scores (`Strategy.wants_scores`), `chosen` has for each row the experts that
    the gate chose, best first. In the latter case `scores` has for each row the score of every expert, to which the
    routing weights are proportional.
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
    """Token number `index` of the answer (0: prefill's) exists; decode pass `index` will read it. After a block, it is
    the last of the tokens that the block gave.

    `drafts`: passes that the shadow may run ahead of that pass, to draft the tokens after it; 0: it need not draft.
    `foretold`: whether the token had been drafted rightly; None: there was no draft of it. For recordings.
    """

    request: int
    index: int
    drafts: int = 0
    foretold: bool | None = None


@_message
class WorkerWaitExpired:
    """Workers were lost, and those that are left cannot hold the experts; none came in time. Open requests fail."""

    reason: str


@_message
class RequestsStalled:
    """For too long, no expert that a layer waits for was loaded or computed, though workers may be there. The requests
    of such layers fail."""

    reason: str


@_message
class AuditRequested:
    """`rows` rows that a worker has computed are to be computed again by another one, not by those in `avoid`.

    It is done at once by a worker that has nothing else to do, or not at all: `AuditDropped` then says so. Its
    computation is a `Compute` whose visit is `Visit(-audit, 0, layer)`. `audit`: a number above 0 used once.
    """

    audit: int
    expert: ExpertId
    rows: int
    avoid: tuple[int, ...]


Event = (
    WorkerJoined
    | WorkerLost
    | HoldingsChanged
    | HostMemoryShrunk
    | ShadowJoined
    | ShadowLost
    | RequestOpened
    | RequestClosed
    | StepStarted
    | Predicted
    | GateFired
    | Foreseen
    | LoadEnded
    | LoadFailed
    | ComputeEnded
    | ComputeFailed
    | TokenDecoded
    | WorkerWaitExpired
    | RequestsStalled
    | AuditRequested
)

# --- commands: what to do ---------------------------------------------------------------------------------------


@_message
class Route:
    """Comes before any computation of this visit. `experts`: for each row the experts that compute it in place of the
    gate's; empty if the gate's choice stands. `resident`: those of the visit's experts whose bytes are in a slot."""

    visit: Visit
    experts: tuple[tuple[int, ...], ...]
    resident: tuple[int, ...]


@_message
class Load:
    """Start loading; the slot is free. Ends in LoadEnded or LoadFailed, unless an Evict of the slot comes first.

    `form`: the form in which the expert is loaded; empty: the full one. `host_slot`: of host memory, through which it
    goes and where it stays; None: none. `in_memory`: its bytes are there already, and nothing is read from disk."""

    worker: int
    slot: int
    expert: ExpertId
    load_id: int
    form: str = ""
    host_slot: int | None = None
    in_memory: bool = False


@_message
class Evict:
    """Free the slot at once. A load that is still in flight is given up."""

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
    """All experts of this visit have been computed, and the main model continues."""

    visit: Visit


@_message
class Follow:
    """Make the shadow follow the request: it prefills all tokens before decode pass `step` and continues from there."""

    request: int
    step: int


@_message
class Align:
    """Tell the shadow that decode pass `step` may start. If `token`, the main model's token is sent with it, and also
    the main model's KV rows of positions [kv_start, kv_stop), if there are any. `drafts`: see `TokenDecoded`. `before`:
    after a block, the number of passes just before `step` whose tokens are sent, too."""

    request: int
    step: int
    token: bool
    kv_start: int
    kv_stop: int
    drafts: int = 0
    before: int = 0


@_message
class Unfollow:
    """Make the shadow forget the request."""

    request: int


@_message
class Fail:
    """The request cannot go on."""

    request: int
    reason: str


@_message
class AuditDropped:
    """The audit is not done, or not to its end: no worker is idle, or its slot is needed."""

    audit: int


Command = Route | Load | Evict | Compute | Resume | Follow | Align | Unfollow | Fail | AuditDropped

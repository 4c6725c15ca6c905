"""The messages between nodes, as plain frozen dataclasses.

The in-process transport passes these objects as they are; the gRPC transport encodes them with `wire.codec` as
`proto/odmoe.proto` declares them.
"""

from __future__ import annotations

from dataclasses import dataclass

from wire.message_tensors import DTYPE_BYTES as DTYPE_BYTES
from wire.message_tensors import MAX_DIMS as MAX_DIMS
from wire.message_tensors import MAX_ENCODED_BYTES as MAX_ENCODED_BYTES
from wire.message_tensors import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES
from wire.message_tensors import Buffer as Buffer
from wire.message_tensors import LocalTensor as LocalTensor
from wire.message_tensors import Tensor as Tensor
from wire.stage_messages import AlignLayers as AlignLayers
from wire.stage_messages import CancelRun as CancelRun
from wire.stage_messages import MarkLayers as MarkLayers
from wire.stage_messages import RanLayers as RanLayers
from wire.stage_messages import ReturnTo as ReturnTo
from wire.stage_messages import RunLayers as RunLayers
from wire.stage_messages import StageReady as StageReady
from wire.stage_messages import TakenRows as TakenRows

PROTOCOL_VERSION = 14
"""Both ends of a stream must speak the same version."""

KEEP_BYTES = 1 << 20
"""Most bytes of an expert in one `Keep`: rows for the worker may wait as long as these take, 8 ms at 1 Gbit/s."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat. Transports exchange it in both directions; handlers never see one."""

    coming: int
    """Bytes of the next message if it is large enough to take a while, else 0."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Several messages that travel as one. Transports make and undo it; handlers never see one."""

    messages: tuple[bytes, ...]
    """Encoded, in the order in which they were sent."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A node returns this message at once; the main node measures the round trip with it."""

    number: int


@dataclass(frozen=True, slots=True)
class Stamped:
    """Wraps any other message in emulated time (`odmoe.clusters.timed_streams`); handlers never see one."""

    due: float
    """When the message counts as arrived, in seconds of `machine`'s clock."""
    sent: float
    """When it was sent, in seconds of the same clock."""
    machine: str
    message: Message


# --- main node -> worker ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of every stream."""

    version: int
    fingerprint: str
    """Identifies the caller's model."""
    dtype: str
    node: str
    """Name of the caller."""
    trace: bool = False
    """Whether the node is to record spans."""
    session: str = ""
    """The caller's own, at random: a main node that connects again is known by it. Empty: never the same."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load an expert into a slot, which is free by then. Answered by `Loaded` unless an `Evict` overtakes it."""

    load_id: int
    slot: int
    layer: int
    expert: int
    form: str = ""
    """One of the store's forms; empty for the full one, as in the checkpoint."""
    host_slot: int | None = None
    """Of host memory, through which it goes and where it stays. None: none."""


@dataclass(frozen=True, slots=True)
class Evict:
    """Free a slot and cancel a load into it. Not answered."""

    slot: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Run the slot's expert once its load has ended. Answered by `Computed`."""

    call_id: int
    slot: int
    layer: int
    expert: int
    hidden: Tensor | LocalTensor
    """[n, H]"""
    weights: Tensor | LocalTensor
    """Routing weights [n]."""
    evict: bool
    """Whether to free the slot afterwards."""
    checksum: int = 0
    """xxh3-64 of the bytes of `hidden`, then of `weights`; 0: none was made."""
    passes: tuple[int, ...] = ()
    """Of a block, the number of the pass that each row is of: rows of one pass are computed to the bits that they have
    without the others. Empty: all are of one pass."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Write bytes of an expert to the part of the store on the worker's disk. Answered by `Kept`.

    An expert's bytes come in order, all of one form, then all of the next. With its last ones the worker compares them
    with its store's checksums, and holds the expert from then on.
    """

    number: int
    layer: int
    expert: int
    form: str
    offset: int
    """Of `data` in the expert's bytes of this form; 0 begins the form anew."""
    data: bytes
    last: bool
    """Nothing of any form follows."""


# --- worker -> main node ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """Answer to `Hello`: what this worker is, and where it runs."""

    version: int
    node: str
    slots: int
    """0 for a host place, which computes experts where they lie, without a load."""
    slot_bytes: int
    """Size of one slot."""
    device: str
    """torch's name of the device."""
    loader: str
    host: str
    pid: int
    device_name: str
    """The model of the processor or GPU."""
    device_bytes: int
    """All of the device's memory; 0 if it is not known."""
    load_bytes_per_s: float
    """The loader's bandwidth, measured at start; 0 if no load ended in time."""
    call_s: float = 0.0
    """Seconds to compute an expert, for each call, measured at start; 0 if not measured."""
    row_s: float = 0.0
    """The same for each row of a call."""
    forms: tuple[str, ...] = ()
    """Forms whose costs were measured at start, the full one (empty) among them. Each of the following has a value for
    each form."""
    form_load_s: tuple[float, ...] = ()
    """Seconds to load an expert in the form."""
    form_restore_s: tuple[float, ...] = ()
    """Seconds to restore it for a computation."""
    form_fits: tuple[bool, ...] = ()
    """Whether the worker has slots, and memory to restore it, for the form."""
    queue_bytes: int = 0
    """Most bytes of rows that may wait here; the main node keeps back what exceeds it. 0: as many as a message has."""
    host_slots: int = 0
    """Experts for which there is room in host memory, between disk and slots."""
    host_load_s: float = 0.0
    """Seconds of a load from there, measured at start; `load_bytes_per_s` is then from disk."""
    in_parts: bool = False
    """The worker holds only the experts in `held`; else all of the store."""
    held: tuple[int, ...] = ()
    """Layer, first and last expert of each range that it holds, one after the other, ascending."""


@dataclass(frozen=True, slots=True)
class Held:
    """The worker's part of the store has changed. The fields are as those of `WorkerReady`."""

    in_parts: bool
    held: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostShrunk:
    """The machine ran short of memory: only the first `host_slots` host slots are left."""

    host_slots: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Answer to `Keep`: the bytes are written, and after the last ones the expert is held; or why not."""

    number: int
    error: str = ""
    """Class and text of the error; the expert has to come again from its beginning. Empty: none."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load has ended: `nbytes` moved in `seconds`."""

    load_id: int
    nbytes: int
    seconds: float
    checked: bool = False
    """Whether the bytes in the slot were compared with the store's checksum."""


@dataclass(frozen=True, slots=True)
class Computed:
    """`output` [n, H]: the expert's rows, times their routing weights."""

    call_id: int
    output: Tensor | LocalTensor
    seconds: float
    checksum: int = 0
    """xxh3-64 of the bytes of `output`, made where it was computed; 0: none was made."""


@dataclass(frozen=True, slots=True)
class WorkerUsage:
    """Answer to `AskUsage`: what the slots held and loaded since start."""

    resident_experts_max: int
    device_bytes_max: int
    loads: int
    bytes_loaded: int
    loads_checked: int = 0
    """Loads whose bytes were compared with the store's checksum."""
    host_bytes_max: int = 0
    """Most bytes of host memory between disk and slots."""
    loads_from_memory: int = 0
    """Loads of experts that were there."""


@dataclass(frozen=True, slots=True)
class AskUsage:
    """Request for memory figures. Answered by `WorkerUsage` or `ShadowUsage`."""


@dataclass(frozen=True, slots=True)
class AskTrace:
    """Request for the spans since the last answer, for a node that records them. Answered by `TraceRecords`."""


@dataclass(frozen=True, slots=True)
class TraceRecords:
    """Spans of a node (`scheduler.trace`), one in each position of the four tuples. Times are seconds of its clock."""

    machine: str
    """Nodes with the same value share a clock."""
    now: float
    """The clock's time when this was sent."""
    whats: tuple[str, ...]
    labels: tuple[str, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    more: bool
    """Whether another `AskTrace` is needed for the rest."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A request to the peer failed. The id that is set names the request; all zero: the whole node failed."""

    error: str
    message: str
    load_id: int = 0
    call_id: int = 0
    request: int = 0


# --- main node -> shadow ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """Follow a request."""

    request: int
    prompt: tuple[int, ...]
    """Tokens before decode pass `first_step`: the prompt, and the answer so far."""
    first_step: int
    max_new_tokens: int
    """The most tokens of the answer."""
    align_token: int
    """Period of token alignment; 0 for never."""
    align_kv: int
    """Period of KV alignment; 0 for never."""
    lookahead: int
    """Decode passes that the shadow may be ahead of the last `Align`."""
    late: bool
    """A pass waits for its alignment (the late departure), in place of running ahead of it."""


@dataclass(frozen=True, slots=True)
class Align:
    """Decode pass `step` may start."""

    request: int
    step: int
    """0 for the first pass after prefill."""
    token: int | None
    """The main model's token that the pass reads, if token alignment is due."""
    kv_start: int
    kv: tuple[Tensor | LocalTensor, ...]
    """The main model's KV rows from position `kv_start` on and its states; empty unless KV alignment is due. One tensor
    for each of the cache, in the order of `checkpoint.kv`, of shape [0] if this message has nothing of it."""
    more: bool = False
    """Whether more rows of this pass follow in another message; the pass starts after the last."""
    drafts: int = 0
    """Passes that the shadow may run ahead of this one, from its own tokens, and sends its tokens for. 0: it drafts
    nothing, and is ahead by no more than `OpenRequest.lookahead`."""
    before: tuple[int, ...] = ()
    """After a block: the main model's tokens that the passes just before `step` read, as many as there are. Empty
    unless token alignment is due."""


@dataclass(frozen=True, slots=True)
class CloseRequest:
    """The request has ended or was cancelled. Not answered; predictions in flight may still arrive."""

    request: int


# --- shadow -> main node ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShadowReady:
    """Answer to `Hello`. `device_bytes` is the size of the quantised model; the rest is as for a worker."""

    version: int
    node: str
    scheme: str
    device_bytes: int
    host: str
    pid: int
    device_name: str
    device: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """The experts that the shadow's gate of `layer` chose for the token at `position`, best first, with weights."""

    request: int
    position: int
    layer: int
    experts: tuple[int, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ShadowProgress:
    """A layer was routed as predicted before, so that no prediction says how far the shadow is. Sent in emulated runs
    only."""

    request: int
    step: int
    """The decode pass of the last `Align` that was taken into account."""
    idle: bool
    """There will be no more predictions before the next `Align`."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The shadow's own token for a decode pass. It replaces one that was sent before, and those of later passes."""

    request: int
    step: int
    """The pass that would read it."""
    token: int
    path: int
    """`scheduler.drafts.path.extend` of the answer before it: a draft of another answer is of no use."""


@dataclass(frozen=True, slots=True)
class ShadowUsage:
    """The peak size of the shadow's weights and caches since start, measured from its tensors."""

    device_bytes_max: int


ToWorker = Hello | Load | Evict | Compute | Keep | AskUsage | AskTrace | Echo | Beat | Bundle
FromWorker = (
    WorkerReady
    | Held
    | Kept
    | Loaded
    | Computed
    | WorkerUsage
    | HostShrunk
    | TraceRecords
    | Failed
    | Echo
    | Beat
    | Bundle
)
ToShadow = Hello | OpenRequest | Align | CloseRequest | AskUsage | AskTrace | Echo | Beat
FromShadow = ShadowReady | Prediction | ShadowProgress | Draft | ShadowUsage | TraceRecords | Failed | Echo | Beat
ToStage = Hello | RunLayers | TakenRows | CancelRun | AlignLayers | MarkLayers | ReturnTo | CloseRequest | Echo | Beat
FromStage = StageReady | Prediction | RanLayers | TakenRows | Failed | Echo | Beat
Message = ToWorker | FromWorker | ToShadow | FromShadow | ToStage | FromStage | Stamped

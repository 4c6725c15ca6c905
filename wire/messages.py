"""What nodes say to each other, as plain frozen dataclasses.

The in-process transport passes these objects as they are; the gRPC transport encodes them with `wire.codec`
after `proto/odmoe.proto`. No torch here: a tensor is its description and its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOL_VERSION = 5
"""Both ends of a stream must speak the same version."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""No message is larger; larger tensors are sent in parts."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}
"""The dtypes a tensor on the wire may have, and their size."""

MAX_DIMS = 8

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Tensor:
    """A dense, C-contiguous, little-endian tensor: `len(data)` is the product of `shape` times the dtype's size."""

    dtype: str
    shape: tuple[int, ...]
    data: Buffer


@dataclass(frozen=True, slots=True)
class Beat:
    """The sender lives. Transports send it, in either direction, and keep it to themselves: no handler ever sees one.

    `coming`: how many bytes the next message has, where that is so many that it may take a while; else 0.
    """

    coming: int


@dataclass(frozen=True, slots=True)
class Echo:
    """Asks a node for the same message back, at once: how long that takes is the round trip between the two."""

    number: int


@dataclass(frozen=True, slots=True)
class Stamped:
    """Around any other message, in emulated time: it was sent at `sent` and is due at `due`, in seconds of the clock of
    `machine`. See `odmoe.clusters.timed_streams`; no handler inside ever sees one."""

    due: float
    sent: float
    machine: str
    message: Message


# --- main node -> worker ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of every stream. `fingerprint` names the model that the caller runs; `trace`: keep spans."""

    version: int
    fingerprint: str
    dtype: str
    node: str
    trace: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Load an expert into a slot that is free by then. Answered by `Loaded` unless an `Evict` overtakes it.

    `form`: in which of the store's forms; empty: the full one, as the checkpoint has it.
    """

    load_id: int
    slot: int
    layer: int
    expert: int
    form: str = ""


@dataclass(frozen=True, slots=True)
class Evict:
    """Free a slot; a load into it that has not ended is given up. Not answered."""

    slot: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Run the slot's expert on `hidden` [n, H] with routing weights `weights` [n], once its load has ended.

    `evict`: free the slot right after. Answered by `Computed`.
    """

    call_id: int
    slot: int
    layer: int
    expert: int
    hidden: Tensor
    weights: Tensor
    evict: bool


# --- worker -> main node ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """Answer to `Hello`: what this worker is, and where it runs. `slot_bytes` is the size of one slot.

    `device`: as torch has it; `device_name`: as a person knows it (the processor, the GPU), `device_bytes`: all of its
    memory. `load_bytes_per_s`: the loader's bandwidth, measured at start; 0 where no load ended in time. A worker with
    no slots is a host place: it computes any expert where it lies, without a load. `call_s` and `row_s`: what an expert
    takes to compute, for each call and for each row of it, in seconds, measured at start; 0 where it was not.
    """

    version: int
    node: str
    slots: int
    slot_bytes: int
    device: str
    loader: str
    host: str
    pid: int
    device_name: str
    device_bytes: int
    load_bytes_per_s: float
    call_s: float = 0.0
    row_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load has ended: `nbytes` moved in `seconds`."""

    load_id: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Computed:
    """`output` [n, H]: the expert's rows, times their routing weights."""

    call_id: int
    output: Tensor
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerUsage:
    """Measured from the slots, since start: sent on `AskUsage`."""

    resident_experts_max: int
    device_bytes_max: int
    loads: int
    bytes_loaded: int


@dataclass(frozen=True, slots=True)
class AskUsage:
    """Asks a worker or a shadow what it holds. Answered by `WorkerUsage` or `ShadowUsage`."""


@dataclass(frozen=True, slots=True)
class AskTrace:
    """Asks a node that was told to keep spans for what it has not told yet. Answered by `TraceRecords`."""


@dataclass(frozen=True, slots=True)
class TraceRecords:
    """Spans in the node's own words, as `scheduler.trace` has them; times are seconds on its clock, which says `now`.

    `machine`: clocks of nodes with the same are one clock. `more`: ask again for the rest.
    """

    machine: str
    now: float
    whats: tuple[str, ...]
    labels: tuple[str, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The peer could not do what was asked. Which of the ids is set says what; all zero: the node as a whole."""

    error: str
    message: str
    load_id: int = 0
    call_id: int = 0
    request: int = 0


# --- main node -> shadow ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """Follow a request: its tokens before decode pass `first_step` (the prompt, at least), both alignment periods
    (0 = never) and how many tokens its answer may have.

    `lookahead`: decode passes the shadow may be ahead of the last `Align` it received.
    """

    request: int
    prompt: tuple[int, ...]
    first_step: int
    max_new_tokens: int
    align_token: int
    align_kv: int
    lookahead: int


@dataclass(frozen=True, slots=True)
class Align:
    """Decode pass `step` (0 = the first after prefill) may start.

    `token`: the main model's token that pass reads, where token alignment is due, else None.
    `kv`: the main model's KV rows [start, start + n) and its states, where KV alignment is due, else empty: every
    tensor of the cache, in the order of `checkpoint.kv`, of shape [0] where this message has nothing of it.
    `more`: rows too large for one message come in several, in order; the pass starts with the last.
    """

    request: int
    step: int
    token: int | None
    kv_start: int
    kv: tuple[Tensor, ...]
    more: bool = False


@dataclass(frozen=True, slots=True)
class CloseRequest:
    """The request is over, done or not. Answered by nothing; predictions on their way may still arrive."""

    request: int


# --- shadow -> main node ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShadowReady:
    """Answer to `Hello`. `device_bytes`: what the quantised model takes; the rest as for a worker."""

    version: int
    node: str
    scheme: str
    device_bytes: int
    host: str
    pid: int
    device_name: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """The shadow's gate of `layer` fired for the token at `position`: experts, best first, and their weights."""

    request: int
    position: int
    layer: int
    experts: tuple[int, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ShadowUsage:
    """Bytes of the shadow's weights and caches, measured from its tensors: the most since start."""

    device_bytes_max: int


ToWorker = Hello | Load | Evict | Compute | AskUsage | AskTrace | Echo | Beat
FromWorker = WorkerReady | Loaded | Computed | WorkerUsage | TraceRecords | Failed | Echo | Beat
ToShadow = Hello | OpenRequest | Align | CloseRequest | AskUsage | AskTrace | Echo | Beat
FromShadow = ShadowReady | Prediction | ShadowUsage | TraceRecords | Failed | Echo | Beat
Message = ToWorker | FromWorker | ToShadow | FromShadow | Stamped

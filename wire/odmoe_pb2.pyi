from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToWorker(_message.Message):
    __slots__ = ("hello", "load", "evict", "compute", "ask_usage", "ask_trace", "keep", "echo", "beat", "bundle", "stamp")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    ASK_USAGE_FIELD_NUMBER: _ClassVar[int]
    ASK_TRACE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    load: Load
    evict: Evict
    compute: Compute
    ask_usage: AskUsage
    ask_trace: AskTrace
    keep: Keep
    echo: Echo
    beat: Beat
    bundle: Bundle
    stamp: Stamp
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., evict: _Optional[_Union[Evict, _Mapping]] = ..., compute: _Optional[_Union[Compute, _Mapping]] = ..., ask_usage: _Optional[_Union[AskUsage, _Mapping]] = ..., ask_trace: _Optional[_Union[AskTrace, _Mapping]] = ..., keep: _Optional[_Union[Keep, _Mapping]] = ..., echo: _Optional[_Union[Echo, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., bundle: _Optional[_Union[Bundle, _Mapping]] = ..., stamp: _Optional[_Union[Stamp, _Mapping]] = ...) -> None: ...

class FromWorker(_message.Message):
    __slots__ = ("worker_ready", "loaded", "computed", "worker_usage", "failed", "trace_records", "held", "host_shrunk", "kept", "echo", "beat", "bundle", "stamp")
    WORKER_READY_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    WORKER_USAGE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    TRACE_RECORDS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    HOST_SHRUNK_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    worker_ready: WorkerReady
    loaded: Loaded
    computed: Computed
    worker_usage: WorkerUsage
    failed: Failed
    trace_records: TraceRecords
    held: Held
    host_shrunk: HostShrunk
    kept: Kept
    echo: Echo
    beat: Beat
    bundle: Bundle
    stamp: Stamp
    def __init__(self, worker_ready: _Optional[_Union[WorkerReady, _Mapping]] = ..., loaded: _Optional[_Union[Loaded, _Mapping]] = ..., computed: _Optional[_Union[Computed, _Mapping]] = ..., worker_usage: _Optional[_Union[WorkerUsage, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., trace_records: _Optional[_Union[TraceRecords, _Mapping]] = ..., held: _Optional[_Union[Held, _Mapping]] = ..., host_shrunk: _Optional[_Union[HostShrunk, _Mapping]] = ..., kept: _Optional[_Union[Kept, _Mapping]] = ..., echo: _Optional[_Union[Echo, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., bundle: _Optional[_Union[Bundle, _Mapping]] = ..., stamp: _Optional[_Union[Stamp, _Mapping]] = ...) -> None: ...

class ToShadow(_message.Message):
    __slots__ = ("hello", "open_request", "align", "close_request", "ask_usage", "ask_trace", "echo", "beat", "stamp")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_REQUEST_FIELD_NUMBER: _ClassVar[int]
    ALIGN_FIELD_NUMBER: _ClassVar[int]
    CLOSE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    ASK_USAGE_FIELD_NUMBER: _ClassVar[int]
    ASK_TRACE_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    open_request: OpenRequest
    align: Align
    close_request: CloseRequest
    ask_usage: AskUsage
    ask_trace: AskTrace
    echo: Echo
    beat: Beat
    stamp: Stamp
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., open_request: _Optional[_Union[OpenRequest, _Mapping]] = ..., align: _Optional[_Union[Align, _Mapping]] = ..., close_request: _Optional[_Union[CloseRequest, _Mapping]] = ..., ask_usage: _Optional[_Union[AskUsage, _Mapping]] = ..., ask_trace: _Optional[_Union[AskTrace, _Mapping]] = ..., echo: _Optional[_Union[Echo, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., stamp: _Optional[_Union[Stamp, _Mapping]] = ...) -> None: ...

class FromShadow(_message.Message):
    __slots__ = ("shadow_ready", "prediction", "shadow_usage", "failed", "trace_records", "shadow_progress", "draft", "echo", "beat", "stamp")
    SHADOW_READY_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    SHADOW_USAGE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    TRACE_RECORDS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    shadow_ready: ShadowReady
    prediction: Prediction
    shadow_usage: ShadowUsage
    failed: Failed
    trace_records: TraceRecords
    shadow_progress: ShadowProgress
    draft: Draft
    echo: Echo
    beat: Beat
    stamp: Stamp
    def __init__(self, shadow_ready: _Optional[_Union[ShadowReady, _Mapping]] = ..., prediction: _Optional[_Union[Prediction, _Mapping]] = ..., shadow_usage: _Optional[_Union[ShadowUsage, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., trace_records: _Optional[_Union[TraceRecords, _Mapping]] = ..., shadow_progress: _Optional[_Union[ShadowProgress, _Mapping]] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ..., echo: _Optional[_Union[Echo, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., stamp: _Optional[_Union[Stamp, _Mapping]] = ...) -> None: ...

class ToStage(_message.Message):
    __slots__ = ("hello", "run_layers", "taken_rows", "cancel_run", "align_layers", "mark_layers", "return_to", "close_request", "echo", "beat", "stamp")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RUN_LAYERS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_ROWS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_RUN_FIELD_NUMBER: _ClassVar[int]
    ALIGN_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MARK_LAYERS_FIELD_NUMBER: _ClassVar[int]
    RETURN_TO_FIELD_NUMBER: _ClassVar[int]
    CLOSE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    run_layers: RunLayers
    taken_rows: TakenRows
    cancel_run: CancelRun
    align_layers: AlignLayers
    mark_layers: MarkLayers
    return_to: ReturnTo
    close_request: CloseRequest
    echo: Echo
    beat: Beat
    stamp: Stamp
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., run_layers: _Optional[_Union[RunLayers, _Mapping]] = ..., taken_rows: _Optional[_Union[TakenRows, _Mapping]] = ..., cancel_run: _Optional[_Union[CancelRun, _Mapping]] = ..., align_layers: _Optional[_Union[AlignLayers, _Mapping]] = ..., mark_layers: _Optional[_Union[MarkLayers, _Mapping]] = ..., return_to: _Optional[_Union[ReturnTo, _Mapping]] = ..., close_request: _Optional[_Union[CloseRequest, _Mapping]] = ..., echo: _Optional[_Union[Echo, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., stamp: _Optional[_Union[Stamp, _Mapping]] = ...) -> None: ...

class FromStage(_message.Message):
    __slots__ = ("stage_ready", "prediction", "ran_layers", "taken_rows", "failed", "echo", "beat", "stamp")
    STAGE_READY_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    RAN_LAYERS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_ROWS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    stage_ready: StageReady
    prediction: Prediction
    ran_layers: RanLayers
    taken_rows: TakenRows
    failed: Failed
    echo: Echo
    beat: Beat
    stamp: Stamp
    def __init__(self, stage_ready: _Optional[_Union[StageReady, _Mapping]] = ..., prediction: _Optional[_Union[Prediction, _Mapping]] = ..., ran_layers: _Optional[_Union[RanLayers, _Mapping]] = ..., taken_rows: _Optional[_Union[TakenRows, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., echo: _Optional[_Union[Echo, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., stamp: _Optional[_Union[Stamp, _Mapping]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSET: _ClassVar[Tensor.DType]
        FLOAT32: _ClassVar[Tensor.DType]
        FLOAT16: _ClassVar[Tensor.DType]
        BFLOAT16: _ClassVar[Tensor.DType]
        INT64: _ClassVar[Tensor.DType]
        INT32: _ClassVar[Tensor.DType]
        UINT8: _ClassVar[Tensor.DType]
    UNSET: Tensor.DType
    FLOAT32: Tensor.DType
    FLOAT16: Tensor.DType
    BFLOAT16: Tensor.DType
    INT64: Tensor.DType
    INT32: Tensor.DType
    UINT8: Tensor.DType
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: Tensor.DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[_Union[Tensor.DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Stamp(_message.Message):
    __slots__ = ("due", "sent", "machine")
    DUE_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    due: float
    sent: float
    machine: str
    def __init__(self, due: _Optional[float] = ..., sent: _Optional[float] = ..., machine: _Optional[str] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("coming",)
    COMING_FIELD_NUMBER: _ClassVar[int]
    coming: int
    def __init__(self, coming: _Optional[int] = ...) -> None: ...

class Bundle(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, messages: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Echo(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "fingerprint", "dtype", "node", "trace", "session")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    fingerprint: str
    dtype: str
    node: str
    trace: bool
    session: str
    def __init__(self, version: _Optional[int] = ..., fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., node: _Optional[str] = ..., trace: _Optional[bool] = ..., session: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("load_id", "slot", "layer", "expert", "form", "host_slot")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    HOST_SLOT_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    slot: int
    layer: int
    expert: int
    form: str
    host_slot: int
    def __init__(self, load_id: _Optional[int] = ..., slot: _Optional[int] = ..., layer: _Optional[int] = ..., expert: _Optional[int] = ..., form: _Optional[str] = ..., host_slot: _Optional[int] = ...) -> None: ...

class Evict(_message.Message):
    __slots__ = ("slot",)
    SLOT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    def __init__(self, slot: _Optional[int] = ...) -> None: ...

class Compute(_message.Message):
    __slots__ = ("call_id", "slot", "layer", "expert", "hidden", "weights", "evict", "checksum", "passes")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    slot: int
    layer: int
    expert: int
    hidden: Tensor
    weights: Tensor
    evict: bool
    checksum: int
    passes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, call_id: _Optional[int] = ..., slot: _Optional[int] = ..., layer: _Optional[int] = ..., expert: _Optional[int] = ..., hidden: _Optional[_Union[Tensor, _Mapping]] = ..., weights: _Optional[_Union[Tensor, _Mapping]] = ..., evict: _Optional[bool] = ..., checksum: _Optional[int] = ..., passes: _Optional[_Iterable[int]] = ...) -> None: ...

class Keep(_message.Message):
    __slots__ = ("number", "layer", "expert", "form", "offset", "data", "last")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    number: int
    layer: int
    expert: int
    form: str
    offset: int
    data: bytes
    last: bool
    def __init__(self, number: _Optional[int] = ..., layer: _Optional[int] = ..., expert: _Optional[int] = ..., form: _Optional[str] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...

class AskUsage(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AskTrace(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TraceRecords(_message.Message):
    __slots__ = ("machine", "now", "whats", "labels", "starts", "ends", "more")
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    WHATS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    machine: str
    now: float
    whats: _containers.RepeatedScalarFieldContainer[str]
    labels: _containers.RepeatedScalarFieldContainer[str]
    starts: _containers.RepeatedScalarFieldContainer[float]
    ends: _containers.RepeatedScalarFieldContainer[float]
    more: bool
    def __init__(self, machine: _Optional[str] = ..., now: _Optional[float] = ..., whats: _Optional[_Iterable[str]] = ..., labels: _Optional[_Iterable[str]] = ..., starts: _Optional[_Iterable[float]] = ..., ends: _Optional[_Iterable[float]] = ..., more: _Optional[bool] = ...) -> None: ...

class WorkerReady(_message.Message):
    __slots__ = ("version", "node", "slots", "slot_bytes", "device", "loader", "host", "pid", "device_name", "device_bytes", "load_bytes_per_s", "call_s", "row_s", "forms", "form_load_s", "form_restore_s", "form_fits", "queue_bytes", "host_slots", "host_load_s", "in_parts", "held")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LOADER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    CALL_S_FIELD_NUMBER: _ClassVar[int]
    ROW_S_FIELD_NUMBER: _ClassVar[int]
    FORMS_FIELD_NUMBER: _ClassVar[int]
    FORM_LOAD_S_FIELD_NUMBER: _ClassVar[int]
    FORM_RESTORE_S_FIELD_NUMBER: _ClassVar[int]
    FORM_FITS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_SLOTS_FIELD_NUMBER: _ClassVar[int]
    HOST_LOAD_S_FIELD_NUMBER: _ClassVar[int]
    IN_PARTS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
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
    call_s: float
    row_s: float
    forms: _containers.RepeatedScalarFieldContainer[str]
    form_load_s: _containers.RepeatedScalarFieldContainer[float]
    form_restore_s: _containers.RepeatedScalarFieldContainer[float]
    form_fits: _containers.RepeatedScalarFieldContainer[bool]
    queue_bytes: int
    host_slots: int
    host_load_s: float
    in_parts: bool
    held: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, version: _Optional[int] = ..., node: _Optional[str] = ..., slots: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., device: _Optional[str] = ..., loader: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., device_name: _Optional[str] = ..., device_bytes: _Optional[int] = ..., load_bytes_per_s: _Optional[float] = ..., call_s: _Optional[float] = ..., row_s: _Optional[float] = ..., forms: _Optional[_Iterable[str]] = ..., form_load_s: _Optional[_Iterable[float]] = ..., form_restore_s: _Optional[_Iterable[float]] = ..., form_fits: _Optional[_Iterable[bool]] = ..., queue_bytes: _Optional[int] = ..., host_slots: _Optional[int] = ..., host_load_s: _Optional[float] = ..., in_parts: _Optional[bool] = ..., held: _Optional[_Iterable[int]] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("in_parts", "held")
    IN_PARTS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    in_parts: bool
    held: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, in_parts: _Optional[bool] = ..., held: _Optional[_Iterable[int]] = ...) -> None: ...

class HostShrunk(_message.Message):
    __slots__ = ("host_slots",)
    HOST_SLOTS_FIELD_NUMBER: _ClassVar[int]
    host_slots: int
    def __init__(self, host_slots: _Optional[int] = ...) -> None: ...

class Kept(_message.Message):
    __slots__ = ("number", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    error: str
    def __init__(self, number: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class Loaded(_message.Message):
    __slots__ = ("load_id", "nbytes", "seconds", "checked")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    nbytes: int
    seconds: float
    checked: bool
    def __init__(self, load_id: _Optional[int] = ..., nbytes: _Optional[int] = ..., seconds: _Optional[float] = ..., checked: _Optional[bool] = ...) -> None: ...

class Computed(_message.Message):
    __slots__ = ("call_id", "output", "seconds", "checksum")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    output: Tensor
    seconds: float
    checksum: int
    def __init__(self, call_id: _Optional[int] = ..., output: _Optional[_Union[Tensor, _Mapping]] = ..., seconds: _Optional[float] = ..., checksum: _Optional[int] = ...) -> None: ...

class WorkerUsage(_message.Message):
    __slots__ = ("resident_experts_max", "device_bytes_max", "loads", "bytes_loaded", "loads_checked", "host_bytes_max", "loads_from_memory")
    RESIDENT_EXPERTS_MAX_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    BYTES_LOADED_FIELD_NUMBER: _ClassVar[int]
    LOADS_CHECKED_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    LOADS_FROM_MEMORY_FIELD_NUMBER: _ClassVar[int]
    resident_experts_max: int
    device_bytes_max: int
    loads: int
    bytes_loaded: int
    loads_checked: int
    host_bytes_max: int
    loads_from_memory: int
    def __init__(self, resident_experts_max: _Optional[int] = ..., device_bytes_max: _Optional[int] = ..., loads: _Optional[int] = ..., bytes_loaded: _Optional[int] = ..., loads_checked: _Optional[int] = ..., host_bytes_max: _Optional[int] = ..., loads_from_memory: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("error", "message", "load_id", "call_id", "request")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    error: str
    message: str
    load_id: int
    call_id: int
    request: int
    def __init__(self, error: _Optional[str] = ..., message: _Optional[str] = ..., load_id: _Optional[int] = ..., call_id: _Optional[int] = ..., request: _Optional[int] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("request", "prompt", "first_step", "max_new_tokens", "align_token", "align_kv", "lookahead", "late")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALIGN_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ALIGN_KV_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    request: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    first_step: int
    max_new_tokens: int
    align_token: int
    align_kv: int
    lookahead: int
    late: bool
    def __init__(self, request: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., first_step: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., align_token: _Optional[int] = ..., align_kv: _Optional[int] = ..., lookahead: _Optional[int] = ..., late: _Optional[bool] = ...) -> None: ...

class Align(_message.Message):
    __slots__ = ("request", "step", "token", "kv_start", "kv", "more", "drafts", "before")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    KV_START_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    request: int
    step: int
    token: int
    kv_start: int
    kv: _containers.RepeatedCompositeFieldContainer[Tensor]
    more: bool
    drafts: int
    before: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request: _Optional[int] = ..., step: _Optional[int] = ..., token: _Optional[int] = ..., kv_start: _Optional[int] = ..., kv: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., more: _Optional[bool] = ..., drafts: _Optional[int] = ..., before: _Optional[_Iterable[int]] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: int
    def __init__(self, request: _Optional[int] = ...) -> None: ...

class ShadowReady(_message.Message):
    __slots__ = ("version", "node", "scheme", "device_bytes", "host", "pid", "device_name", "device")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    version: int
    node: str
    scheme: str
    device_bytes: int
    host: str
    pid: int
    device_name: str
    device: str
    def __init__(self, version: _Optional[int] = ..., node: _Optional[str] = ..., scheme: _Optional[str] = ..., device_bytes: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., device_name: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("request", "position", "layer", "experts", "scores")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    request: int
    position: int
    layer: int
    experts: _containers.RepeatedScalarFieldContainer[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, request: _Optional[int] = ..., position: _Optional[int] = ..., layer: _Optional[int] = ..., experts: _Optional[_Iterable[int]] = ..., scores: _Optional[_Iterable[float]] = ...) -> None: ...

class ShadowProgress(_message.Message):
    __slots__ = ("request", "step", "idle")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    request: int
    step: int
    idle: bool
    def __init__(self, request: _Optional[int] = ..., step: _Optional[int] = ..., idle: _Optional[bool] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("request", "step", "token", "path")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    request: int
    step: int
    token: int
    path: int
    def __init__(self, request: _Optional[int] = ..., step: _Optional[int] = ..., token: _Optional[int] = ..., path: _Optional[int] = ...) -> None: ...

class ShadowUsage(_message.Message):
    __slots__ = ("device_bytes_max",)
    DEVICE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    device_bytes_max: int
    def __init__(self, device_bytes_max: _Optional[int] = ...) -> None: ...

class RunLayers(_message.Message):
    __slots__ = ("run", "request", "tokens", "hidden", "more", "marks")
    RUN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    run: int
    request: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    hidden: Tensor
    more: bool
    marks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run: _Optional[int] = ..., request: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., hidden: _Optional[_Union[Tensor, _Mapping]] = ..., more: _Optional[bool] = ..., marks: _Optional[_Iterable[int]] = ...) -> None: ...

class CancelRun(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: int
    def __init__(self, run: _Optional[int] = ...) -> None: ...

class AlignLayers(_message.Message):
    __slots__ = ("request", "kv_start", "kv", "taken_over")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    KV_START_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    TAKEN_OVER_FIELD_NUMBER: _ClassVar[int]
    request: int
    kv_start: int
    kv: _containers.RepeatedCompositeFieldContainer[Tensor]
    taken_over: bool
    def __init__(self, request: _Optional[int] = ..., kv_start: _Optional[int] = ..., kv: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., taken_over: _Optional[bool] = ...) -> None: ...

class MarkLayers(_message.Message):
    __slots__ = ("request", "mark", "rows")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    request: int
    mark: int
    rows: bool
    def __init__(self, request: _Optional[int] = ..., mark: _Optional[int] = ..., rows: _Optional[bool] = ...) -> None: ...

class ReturnTo(_message.Message):
    __slots__ = ("request", "mark")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    request: int
    mark: int
    def __init__(self, request: _Optional[int] = ..., mark: _Optional[int] = ...) -> None: ...

class TakenRows(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: int
    def __init__(self, run: _Optional[int] = ...) -> None: ...

class StageReady(_message.Message):
    __slots__ = ("version", "node", "scheme", "first", "stop", "device_bytes", "host", "pid", "device_name", "device")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    version: int
    node: str
    scheme: str
    first: int
    stop: int
    device_bytes: int
    host: str
    pid: int
    device_name: str
    device: str
    def __init__(self, version: _Optional[int] = ..., node: _Optional[str] = ..., scheme: _Optional[str] = ..., first: _Optional[int] = ..., stop: _Optional[int] = ..., device_bytes: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., device_name: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...

class RanLayers(_message.Message):
    __slots__ = ("run", "hidden", "more", "token", "axes", "states", "cache_bytes")
    RUN_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    AXES_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    run: int
    hidden: Tensor
    more: bool
    token: int
    axes: _containers.RepeatedScalarFieldContainer[int]
    states: int
    cache_bytes: int
    def __init__(self, run: _Optional[int] = ..., hidden: _Optional[_Union[Tensor, _Mapping]] = ..., more: _Optional[bool] = ..., token: _Optional[int] = ..., axes: _Optional[_Iterable[int]] = ..., states: _Optional[int] = ..., cache_bytes: _Optional[int] = ...) -> None: ...

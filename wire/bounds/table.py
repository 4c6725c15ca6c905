"""What every field of every message may be: one table, derived from the model.

Protobuf and `wire.codec` bound a field by its type, and a message by its bytes. These bounds are the model's: layers
and experts that it has, rows that its experts take, tokens of its vocabulary, positions of its context.
"""

from __future__ import annotations

from scheduler.limits import MAX_EXPERTS, MAX_SLOTS
from scheduler.model_limits import ModelLimits
from wire import messages as w
from wire.bounds.kinds import (
    U32,
    Bound,
    any_tensor,
    finite,
    flag,
    many,
    number,
    one_of,
    optional,
    seconds,
    size,
    tensor,
    text,
    whole,
    wholes,
)
from wire.messages import DTYPE_BYTES, KEEP_BYTES, MAX_DIMS, MAX_ENCODED_BYTES, MAX_MESSAGE_BYTES
from wire.tracing import PART

MAX_BUNDLED = 4096
"""Messages that travel as one."""

MAX_BLOCK = 4096
"""Tokens of a block before its last."""

MAX_FORMS = 16
"""Forms of a store."""

NAME, MESSAGE = 1024, 1 << 20
"""Characters of a name, and of an error's text."""

MEMORY = 1 << 50
"""Bytes of memory of one node: a petabyte."""

LONG_S = 1e9
"""Seconds: some thirty years. Emulated time may go far."""

RATE = 1e15
"""Bytes a second."""

MAX_MARKS = 1 << 20
"""Passes that a shadow may go back to."""

CACHE_TENSORS = 64
"""Tensors of a KV cache, for each layer."""

MAX_HOST_SLOTS = 1 << 24
"""Experts of a model, in all layers."""

STATE_WIDTH = 64
"""A dimension of a state, as a multiple of the model's hidden size."""


def fields_of(limits: ModelLimits) -> dict[type, dict[str, Bound]]:
    """Message class -> field -> its bound."""
    an_id = number()
    name = text(NAME)
    layer = one_of(limits.experts, f"one of the MoE layers {_short(limits)}")
    experts = max(limits.experts.values(), default=MAX_EXPERTS)
    expert = whole(experts - 1)
    context = min(limits.context or U32, U32)
    position, step = whole(context), whole(context)
    tokens = limits.vocabulary or U32 + 1
    token = whole(tokens - 1)
    slot = whole((limits.slots or MAX_EXPERTS) - 1)
    host_slot = whole(MAX_HOST_SLOTS - 1)
    rows = whole(min(context * experts, MAX_MESSAGE_BYTES), least=1)
    width = _width(limits)
    held = wholes(MAX_EXPERTS, 3 * (sum(limits.experts.values()) or MAX_SLOTS))
    cached = any_tensor(max(limits.context, STATE_WIDTH * limits.hidden) or MAX_MESSAGE_BYTES)
    lasting, rate, memory = seconds(LONG_S), seconds(RATE), whole(MEMORY)
    return {
        w.Tensor: {
            "dtype": one_of(DTYPE_BYTES, ", ".join(DTYPE_BYTES)),
            "shape": many(whole(MAX_MESSAGE_BYTES), MAX_DIMS),
            "data": size(MAX_MESSAGE_BYTES),
        },
        w.Stamped: {"due": finite(), "sent": finite(), "machine": name},
        w.Beat: {"coming": whole(MAX_ENCODED_BYTES)},
        w.Bundle: {"messages": many(size(MAX_ENCODED_BYTES), MAX_BUNDLED)},
        w.Echo: {"number": an_id},
        # main node -> worker
        w.Hello: {
            "version": whole(U32),
            "fingerprint": name,
            "dtype": name,
            "node": name,
            "trace": flag(),
            "session": name,
        },
        w.Load: {
            "load_id": an_id,
            "slot": slot,
            "layer": layer,
            "expert": expert,
            "form": name,
            "host_slot": optional(host_slot),
        },
        w.Evict: {"slot": slot},
        w.Compute: {
            "call_id": an_id,
            "slot": slot,
            "layer": layer,
            "expert": expert,
            "hidden": tensor(rows, width),
            "weights": tensor(rows),
            "evict": flag(),
            "checksum": an_id,
            "passes": wholes(U32, min(context, MAX_MESSAGE_BYTES)),
        },
        w.Keep: {
            "number": an_id,
            "layer": layer,
            "expert": expert,
            "form": name,
            "offset": memory,
            "data": size(KEEP_BYTES),
            "last": flag(),
        },
        w.AskUsage: {},
        w.AskTrace: {},
        # worker -> main node
        w.WorkerReady: {
            "version": whole(U32),
            "node": name,
            "slots": whole(limits.slots or MAX_EXPERTS),
            "slot_bytes": whole(limits.slot_bytes or MEMORY),
            "device": name,
            "loader": name,
            "host": name,
            "pid": whole(U32),
            "device_name": name,
            "device_bytes": memory,
            "load_bytes_per_s": rate,
            "call_s": lasting,
            "row_s": lasting,
            "forms": many(name, MAX_FORMS),
            "form_load_s": many(lasting, MAX_FORMS),
            "form_restore_s": many(lasting, MAX_FORMS),
            "form_fits": many(flag(), MAX_FORMS),
            "queue_bytes": memory,
            "host_slots": whole(MAX_HOST_SLOTS),
            "host_load_s": lasting,
            "in_parts": flag(),
            "held": held,
        },
        w.Held: {"in_parts": flag(), "held": held},
        w.HostShrunk: {"host_slots": whole(MAX_HOST_SLOTS)},
        w.Kept: {"number": an_id, "error": text(MESSAGE)},
        w.Loaded: {
            "load_id": an_id,
            "nbytes": whole(limits.slot_bytes or MEMORY),
            "seconds": lasting,
            "checked": flag(),
        },
        w.Computed: {
            "call_id": an_id,
            "output": tensor(rows, width),
            "seconds": lasting,
            "checksum": an_id,
        },
        w.WorkerUsage: {
            "resident_experts_max": whole(limits.slots or MAX_EXPERTS),
            "device_bytes_max": memory,
            "loads": memory,
            "bytes_loaded": an_id,
            "loads_checked": memory,
            "host_bytes_max": memory,
            "loads_from_memory": memory,
        },
        w.TraceRecords: {
            "machine": name,
            "now": finite(),
            "whats": many(name, PART),
            "labels": many(name, PART),
            "starts": many(finite(), PART),
            "ends": many(finite(), PART),
            "more": flag(),
        },
        w.Failed: {"error": name, "message": text(MESSAGE), "load_id": an_id, "call_id": an_id, "request": an_id},
        # main node -> shadow
        w.OpenRequest: {
            "request": an_id,
            "prompt": wholes(tokens - 1, context, least=1),
            "first_step": step,
            "max_new_tokens": whole(context, least=1),
            "align_token": whole(U32),
            "align_kv": whole(U32),
            "lookahead": whole(U32),
            "late": flag(),
        },
        w.Align: {
            "request": an_id,
            "step": step,
            "token": optional(token),
            "kv_start": position,
            "kv": many(cached, CACHE_TENSORS * (limits.depth or 1024)),
            "more": flag(),
            "drafts": step,
            "before": wholes(tokens - 1, min(context, MAX_BLOCK)),
        },
        w.CloseRequest: {"request": an_id},
        # shadow -> main node
        w.ShadowReady: {
            "version": whole(U32),
            "node": name,
            "scheme": name,
            "device_bytes": memory,
            "host": name,
            "pid": whole(U32),
            "device_name": name,
            "device": name,
        },
        w.Prediction: {
            "request": an_id,
            "position": position,
            "layer": layer,
            "experts": wholes(experts - 1, experts),
            "scores": many(finite(), experts),
        },
        w.Draft: {"request": an_id, "step": step, "token": token, "path": whole(U32)},
        w.ShadowProgress: {"request": an_id, "step": step, "idle": flag()},
        w.ShadowUsage: {"device_bytes_max": memory},
        # between shadow and stage
        w.RunLayers: {
            "run": an_id,
            "request": an_id,
            "tokens": wholes(tokens - 1, context),
            "hidden": cached,
            "more": flag(),
            "marks": many(an_id, MAX_MARKS),
        },
        w.CancelRun: {"run": an_id},
        w.AlignLayers: {
            "request": an_id,
            "kv_start": position,
            "kv": many(cached, CACHE_TENSORS * (limits.depth or 1024)),
            "taken_over": flag(),
        },
        w.MarkLayers: {"request": an_id, "mark": an_id, "rows": flag()},
        w.ReturnTo: {"request": an_id, "mark": an_id},
        w.TakenRows: {"run": an_id},
        w.StageReady: {
            "version": whole(U32),
            "node": name,
            "scheme": name,
            "first": whole(limits.depth or U32),
            "stop": whole(limits.depth or U32),
            "device_bytes": memory,
            "host": name,
            "pid": whole(U32),
            "device_name": name,
            "device": name,
        },
        w.RanLayers: {
            "run": an_id,
            "hidden": cached,
            "more": flag(),
            "token": optional(token),
            "axes": wholes(MAX_DIMS, CACHE_TENSORS * (limits.depth or 1024)),
            "states": whole(CACHE_TENSORS * (limits.depth or 1024)),
            "cache_bytes": memory,
        },
    }


def _width(limits: ModelLimits) -> Bound:
    """Of an expert's rows; `wire.bounds.relations` looks at the layer's own."""
    widths = frozenset().union(*limits.widths.values()) if limits.widths else frozenset()
    return one_of(widths, f"one of {sorted(widths)}") if widths else whole(MAX_MESSAGE_BYTES, least=1)


def _short(limits: ModelLimits) -> str:
    layers = sorted(limits.experts)
    shown = ", ".join(map(str, layers[:8]))
    return f"{shown}, ... {layers[-1]}" if len(layers) > 8 else shown

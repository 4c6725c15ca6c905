"""What fields of a message must be to each other. A relation returns its fault in words; empty: there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scheduler.held import ranges_from
from scheduler.model_limits import ModelLimits
from wire import messages as w

Relation = Callable[[Any], str]
MOST_UNKNOWN_BYTES = 1 << 40
"""Of slots on an accelerator whose memory torch does not know: more than one has."""


def relations_of(limits: ModelLimits) -> dict[type, Relation]:
    """Message class -> the relation of its fields."""
    counts, widths = limits.experts, limits.widths

    def of_layer(layer: int, expert: int) -> str:
        count = counts.get(layer, expert + 1)
        return "" if expert < count else f"expert {expert} of layer {layer}, which has {count}"

    def compute(message: w.Compute) -> str:
        hidden, weights = message.hidden, message.weights
        if isinstance(hidden, w.Tensor) and isinstance(weights, w.Tensor):
            if hidden.shape[0] != weights.shape[0]:
                return f"{hidden.shape[0]} rows and {weights.shape[0]} weights"
            if widths and hidden.shape[1] not in widths[message.layer]:
                return f"rows of {hidden.shape[1]}; the experts of layer {message.layer} take none of that width"
            if message.passes and len(message.passes) != hidden.shape[0]:
                return f"{hidden.shape[0]} rows of {len(message.passes)} passes"
        return of_layer(message.layer, message.expert)

    def prediction(message: w.Prediction) -> str:
        if len(message.experts) != len(message.scores):
            return f"{len(message.experts)} experts and {len(message.scores)} scores"
        return of_layer(message.layer, max(message.experts, default=0))

    def align(message: w.Align) -> str:
        if len(message.before) > message.step:
            return f"{len(message.before)} tokens of passes before pass {message.step}"
        return ""

    return {
        w.Align: align,
        w.Load: lambda message: of_layer(message.layer, message.expert),
        w.Keep: lambda message: of_layer(message.layer, message.expert),
        w.Compute: compute,
        w.Prediction: prediction,
        w.WorkerReady: lambda message: _ready(message, limits),
        w.Held: lambda message: _held(message, limits),
        w.WorkerUsage: lambda message: _usage(message, limits),
        w.TraceRecords: _spans,
        w.OpenRequest: lambda message: _request(message, limits),
    }


def _held(message: w.WorkerReady | w.Held, limits: ModelLimits) -> str:
    if len(message.held) % 3 or (message.held and not message.in_parts):
        return f"{len(message.held)} numbers for ranges of three, in parts: {message.in_parts}"
    before = (-1, -1)
    for layer, first, last in ranges_from(message.held):
        if limits.experts and last >= limits.experts.get(layer, 0):
            return f"experts {first} to {last} of layer {layer}, which has {limits.experts.get(layer, 0)}"
        if not before < (layer, first) <= (layer, last):
            return f"experts {first} to {last} of layer {layer} after expert {before[1]} of layer {before[0]}"
        before = layer, last
    return ""


def _ready(ready: w.WorkerReady, limits: ModelLimits) -> str:
    if fault := _held(ready, limits):
        return fault
    if not ready.slots:
        return f"no slots, of {ready.slot_bytes} bytes each" if ready.slot_bytes else ""
    least = limits.least_slot_bytes or 1
    if ready.slot_bytes < least:
        return f"slots of {ready.slot_bytes} bytes; the smallest form of an expert takes {least}"
    if not ready.device_bytes and ready.device == "cpu":
        return "a processor with 0 bytes of memory"
    if ready.slots * ready.slot_bytes > (ready.device_bytes or MOST_UNKNOWN_BYTES):
        size = f"{ready.device_bytes} bytes" if ready.device_bytes else "unknown size"
        return f"{ready.slots} slots of {ready.slot_bytes} bytes on a device of {size}"
    lengths = {len(costs) for costs in (ready.forms, ready.form_load_s, ready.form_restore_s, ready.form_fits)}
    return f"{sorted(lengths)} values for its forms" if len(lengths) > 1 else ""


def _usage(usage: w.WorkerUsage, limits: ModelLimits) -> str:
    if usage.loads_checked > usage.loads:
        return f"{usage.loads_checked} checked loads of {usage.loads}"
    if usage.loads_from_memory > usage.loads:
        return f"{usage.loads_from_memory} loads from host memory of {usage.loads}"
    most = (usage.loads + limits.slots + 1) * limits.slot_bytes  # those under way may be counted in part
    if limits.slot_bytes and usage.bytes_loaded > most:
        return f"{usage.bytes_loaded} bytes in {usage.loads} loads of at most {limits.slot_bytes}"
    return ""


def _spans(records: w.TraceRecords) -> str:
    lengths = [len(values) for values in (records.whats, records.labels, records.starts, records.ends)]
    return f"{lengths} parts of spans" if len(set(lengths)) > 1 else ""


def _request(opened: w.OpenRequest, limits: ModelLimits) -> str:
    if opened.first_step >= len(opened.prompt):
        return f"{len(opened.prompt)} tokens before decode pass {opened.first_step}; its prompt must have at least one"
    most = len(opened.prompt) - opened.first_step + opened.max_new_tokens
    return f"up to {most} tokens; the context has {limits.context}" if limits.context and most > limits.context else ""

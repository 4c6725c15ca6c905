"""Every field of every message has a bound, holds at it, and is refused just over it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from scheduler.errors import ProtocolError
from scheduler.limits import MAX_EXPERTS
from scheduler.model_limits import ModelLimits
from wire import messages as w
from wire import odmoe_pb2
from wire.bounds.check import GENERAL, Bounds
from wire.bounds.table import fields_of
from wire.codec import FROM_SHADOW, FROM_STAGE, FROM_WORKER, TO_SHADOW, TO_STAGE, TO_WORKER

LIMITS = ModelLimits(
    experts={1: 8, 3: 4},
    context=100,
    vocabulary=96,
    hidden=64,
    widths={1: frozenset({64, 32}), 3: frozenset({64, 16})},
    depth=4,
    slots=4,
    slot_bytes=1000,
    least_slot_bytes=62,
)
BOUNDS = Bounds(LIMITS)
ENVELOPES = {"ToWorker", "FromWorker", "ToShadow", "FromShadow", "ToStage", "FromStage"}
NAME_OF = {"Stamp": "Stamped"}
PROTO = [m for name, m in odmoe_pb2.DESCRIPTOR.message_types_by_name.items() if name not in ENVELOPES]


def rows(*shape: int, dtype: str = "float32") -> w.Tensor:
    return w.Tensor(dtype, shape, bytes(math.prod(shape) * w.DTYPE_BYTES[dtype]))


GOOD: dict[type, Any] = {
    w.Tensor: rows(2, 64),
    w.Stamped: w.Stamped(1.0, 0.5, "a machine", w.AskUsage()),
    w.Beat: w.Beat(1000),
    w.Bundle: w.Bundle((b"abc",)),
    w.Echo: w.Echo(3),
    w.Hello: w.Hello(9, "abc", "float32", "main"),
    w.Load: w.Load(1, 0, 1, 3),
    w.Evict: w.Evict(3),
    w.Compute: w.Compute(1, 0, 1, 3, rows(2, 64), rows(2), True),
    w.AskUsage: w.AskUsage(),
    w.AskTrace: w.AskTrace(),
    w.WorkerReady: w.WorkerReady(
        9, "w", 2, 900, "cpu", "disk", "box", 7, "a processor", 1800, 1e9, 1e-3, 1e-4, ("",), (0.1,), (0.0,), (True,)
    ),
    w.Held: w.Held(True, (1, 0, 2, 1, 4, 4, 3, 1, 3)),
    w.HostShrunk: w.HostShrunk(3),
    w.Keep: w.Keep(1, 1, 3, "int4", 1 << 20, b"abc", False),
    w.Kept: w.Kept(1, "DoesNotFitError: no room"),
    w.Loaded: w.Loaded(1, 900, 0.1),
    w.Computed: w.Computed(1, rows(2, 64), 0.1),
    w.WorkerUsage: w.WorkerUsage(2, 1800, 5, 4500, 5),
    w.TraceRecords: w.TraceRecords("m", 1.0, ("load",), ("1.2",), (-1.0,), (1.0,), False),
    w.Failed: w.Failed("LinkError", "gone", 1),
    w.OpenRequest: w.OpenRequest(1, (5, 6, 7), 1, 20, 1, 1, 2, False),
    w.Align: w.Align(1, 3, 5, 4, (rows(1, 2, 3, 4), rows(0))),
    w.CloseRequest: w.CloseRequest(1),
    w.ShadowReady: w.ShadowReady(9, "shadow", "nf4", 1000, "box", 7, "a processor", "cpu"),
    w.Prediction: w.Prediction(1, 99, 3, (0, 3), (0.5, 0.5)),
    w.ShadowProgress: w.ShadowProgress(1, 3, True),
    w.Draft: w.Draft(1, 3, 5, 77),
    w.ShadowUsage: w.ShadowUsage(1000),
    w.RunLayers: w.RunLayers(1, 2, (5, 6), rows(1, 2, 64), False, (3,)),
    w.CancelRun: w.CancelRun(1),
    w.AlignLayers: w.AlignLayers(2, 4, (rows(1, 2, 3, 4), rows(0)), True),
    w.MarkLayers: w.MarkLayers(2, 3, False),
    w.ReturnTo: w.ReturnTo(2, 3),
    w.TakenRows: w.TakenRows(1),
    w.StageReady: w.StageReady(9, "part 1", "nf4", 2, 4, 1000, "box", 7, "a processor", "cpu"),
    w.RanLayers: w.RanLayers(1, rows(0), False, 5, (2, 2), 1, 1000),
}
CODECS = TO_WORKER, FROM_WORKER, TO_SHADOW, FROM_SHADOW, TO_STAGE, FROM_STAGE
CODEC_OF = {kind: codec for codec in CODECS for kind in codec._by_type}
FIELDS = [(kind, name) for kind, fields in fields_of(LIMITS).items() for name in fields]


def changed(kind: type, name: str, value: Any) -> Any:
    return replace(GOOD[kind], **{name: value})


@pytest.mark.parametrize("descriptor", PROTO, ids=lambda descriptor: descriptor.name)
def test_every_field_of_every_message_has_a_bound(descriptor):
    cls = getattr(w, NAME_OF.get(descriptor.name, descriptor.name))
    assert list(fields_of(LIMITS)[cls]) == [field.name for field in descriptor.fields]


def test_no_bound_is_of_something_else():
    assert {NAME_OF.get(m.name, m.name) for m in PROTO} == {kind.__name__ for kind in fields_of(LIMITS)}


@pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("bounds", [BOUNDS, GENERAL], ids=["of the model", "of every model"])
def test_what_is_good_passes(kind, bounds):
    bounds.check(GOOD[kind])


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=[f"{kind.__name__}.{name}" for kind, name in FIELDS])
def test_values_just_over_a_bound_are_refused(kind, name):
    """Of one model, and of every model."""
    for limits in (LIMITS, ModelLimits()):
        bound = fields_of(limits)[kind][name]
        assert bound.holds(bound.limit())
        over = bound.over()
        assert over or name in ("data", "messages"), "no value over it is known: it would be larger than a message"
        for value in over:
            assert not bound.holds(value)
            refuse = CODEC_OF[kind].encode if bound.native else Bounds(limits).check
            with pytest.raises(ProtocolError, match=rf"^{kind.__name__}\.{name} is .*; allowed: "):
                refuse(changed(kind, name, value))


REFUSED = {
    "rows and weights": changed(w.Compute, "weights", rows(3)),
    "another layer's width": replace(GOOD[w.Compute], layer=1, hidden=rows(2, 16)),
    "no width": changed(w.Compute, "hidden", rows(2, 0)),
    "no rows": replace(GOOD[w.Compute], hidden=rows(0, 64), weights=rows(0)),
    "whole numbers": changed(w.Compute, "hidden", rows(2, 64, dtype="int32")),
    "one dimension": changed(w.Compute, "hidden", rows(64)),
    "an expert of another layer": replace(GOOD[w.Load], layer=3, expert=4),
    "an expert to keep of another layer": replace(GOOD[w.Keep], layer=3, expert=4),
    "more at once than is to be kept": changed(w.Keep, "data", bytes(w.KEEP_BYTES + 1)),
    "a dense layer": changed(w.Load, "layer", 2),
    "another layer's expert predicted": changed(w.Prediction, "experts", (0, 4)),
    "experts without scores": changed(w.Prediction, "scores", (0.5,)),
    "scores that are not finite": changed(w.Prediction, "scores", (0.5, math.nan)),
    "more slots than memory": changed(w.WorkerReady, "slots", 3),
    "slots of nothing": changed(w.WorkerReady, "slot_bytes", 0),
    "slots smaller than any form": changed(w.WorkerReady, "slot_bytes", 61),
    "a host place with slots' bytes": changed(w.WorkerReady, "slots", 0),
    "50 million slots": changed(w.WorkerReady, "slots", 50_000_000),
    "an infinite bandwidth": changed(w.WorkerReady, "load_bytes_per_s", math.inf),
    "a negative time": changed(w.WorkerReady, "call_s", -1.0),
    "forms without costs": changed(w.WorkerReady, "form_load_s", ()),
    "an expert held that the layer does not have": changed(w.Held, "held", (3, 1, 4)),
    "a layer held that is dense": changed(w.Held, "held", (2, 0, 0)),
    "half a range": changed(w.Held, "held", (1, 0)),
    "a range that ends before it begins": changed(w.Held, "held", (1, 2, 1)),
    "a range twice": changed(w.Held, "held", (1, 0, 2, 1, 2, 3)),
    "all, and some": changed(w.Held, "in_parts", False),
    "an expert held by a worker that is ready": replace(GOOD[w.WorkerReady], in_parts=True, held=(3, 4, 4)),
    "more loads checked than done": changed(w.WorkerUsage, "loads_checked", 6),
    "more bytes than loads": changed(w.WorkerUsage, "bytes_loaded", 10_001),
    "more bytes than a slot": changed(w.Loaded, "nbytes", 1001),
    "a time that is none": changed(w.Computed, "seconds", math.nan),
    "spans of unequal parts": changed(w.TraceRecords, "labels", ()),
    "beyond the context": changed(w.OpenRequest, "max_new_tokens", 99),
    "more tokens than passes before": changed(w.Align, "before", (5, 6, 5, 6)),
    "no prompt before its first pass": changed(w.OpenRequest, "first_step", 3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name):
    with pytest.raises(ProtocolError, match=r"; allowed: | has "):
        BOUNDS.check(REFUSED[name])


def test_without_a_model_the_general_bounds_hold():
    ready = replace(GOOD[w.WorkerReady], slot_bytes=1, device_bytes=1 << 40)
    GENERAL.check(replace(ready, slots=MAX_EXPERTS))
    with pytest.raises(ProtocolError, match=r"WorkerReady\.slots is 50000000; allowed: an integer from 0 to 65536"):
        GENERAL.check(replace(ready, slots=50_000_000))


def test_slots_are_bounded_where_the_memory_of_a_device_is_not_known():
    ready = replace(GOOD[w.WorkerReady], slots=MAX_EXPERTS, slot_bytes=1 << 20, device="xpu:0", device_bytes=0)
    GENERAL.check(ready)
    with pytest.raises(ProtocolError, match="65536 slots of 33554432 bytes on a device of unknown size"):
        GENERAL.check(replace(ready, slot_bytes=1 << 25))
    with pytest.raises(ProtocolError, match="a processor with 0 bytes of memory"):
        GENERAL.check(replace(ready, device="cpu"))


def test_tensors_of_this_process_are_not_looked_at():
    """They are the sender's own, and have been on no wire."""

    def unreadable(local: object) -> Any:
        raise AssertionError("described")

    local = w.LocalTensor(object(), unreadable)
    BOUNDS.check(replace(GOOD[w.Compute], hidden=local, weights=local))

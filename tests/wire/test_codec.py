"""Every message survives the wire, and nothing else passes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.errors import ProtocolError
from wire import odmoe_pb2
from wire.codec import FROM_SHADOW, FROM_WORKER, TO_SHADOW, TO_WORKER
from wire.messages import (
    DTYPE_BYTES,
    MAX_ENCODED_BYTES,
    MAX_MESSAGE_BYTES,
    Align,
    Compute,
    Computed,
    Failed,
    FromShadow,
    FromWorker,
    Hello,
    Load,
    Loaded,
    OpenRequest,
    Prediction,
    Stamped,
    Tensor,
    ToShadow,
    ToWorker,
)

CARRIED = [(TO_WORKER, ToWorker), (FROM_WORKER, FromWorker), (TO_SHADOW, ToShadow), (FROM_SHADOW, FromShadow)]
KINDS = [(codec, cls) for codec, union in CARRIED for cls in get_args(union)]

TENSOR = Tensor("float32", (2, 3), bytes(24))
COMPUTE = Compute(1, 2, 3, 4, TENSOR, Tensor("float32", (2,), bytes(8)), evict=True)


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=8)))
    nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
    data = (draw(st.binary(min_size=1, max_size=8)) * nbytes)[:nbytes]
    return Tensor(dtype, shape, draw(st.sampled_from([data, memoryview(data)])))


SECONDS = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = {
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_DOUBLE: st.floats(allow_nan=False),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.text(),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=64),
    FieldDescriptor.TYPE_MESSAGE: tensors(),
}


def messages_of(cls):
    def values(field):
        one = SCALARS[field.type]
        if field.is_repeated:
            return st.lists(one, max_size=4).map(tuple)
        return st.none() | one if field.has_presence and field.message_type is None else one

    fields = getattr(odmoe_pb2, cls.__name__).DESCRIPTOR.fields
    return st.builds(cls, **{field.name: values(field) for field in fields})


def test_every_message_of_the_contract_is_here():
    assert len({cls for _, cls in KINDS}) == 27


@pytest.mark.parametrize(("codec", "cls"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_round_trip(codec, cls, data):
    """Every message can say when it is due; the numbers come back bit by bit, negative zero too."""
    message = data.draw(messages_of(cls))
    assert codec.decode(codec.encode(message)) == message
    due, sent = data.draw(st.tuples(SECONDS, SECONDS))
    found = codec.decode(codec.encode(Stamped(due, sent, data.draw(st.text()), message)))
    assert isinstance(found, Stamped)
    assert (found.due.hex(), found.sent.hex(), found.message) == (due.hex(), sent.hex(), message)


def test_a_stamp_adds_nothing_to_a_message_without_one():
    plain = odmoe_pb2.ToWorker(load={"load_id": 9, "slot": 0, "layer": 0, "expert": 1}).SerializeToString()
    assert TO_WORKER.encode(Load(9, 0, 0, 1)) == plain
    assert TO_WORKER.decode(plain) == Load(9, 0, 0, 1)


@pytest.mark.parametrize(
    ("stamp", "said"),
    [
        ({"due": math.nan}, r"Stamped\.due is nan; allowed: a finite number of seconds"),
        ({"due": math.inf}, r"Stamped\.due is inf"),
        ({"sent": -math.inf}, r"Stamped\.sent is -inf"),
        ({"due": None}, r"Stamped\.due is None"),
        ({"sent": "now"}, r"Stamped\.sent is 'now'"),
        ({"machine": None}, r"Stamped\.machine is None; allowed: a string"),
        ({"machine": "\ud800"}, r"Stamped\.machine is '\\ud800'; allowed: a string"),
    ],
    ids=str,
)
def test_a_stamp_that_says_no_time_is_refused(stamp, said):
    """By whoever sends it and, where it can travel, by whoever receives it."""
    with pytest.raises(ProtocolError, match=said):
        TO_WORKER.encode(replace(Stamped(1.0, 0.5, "a machine", COMPUTE), **stamp))
    if any(isinstance(value, float) for value in stamp.values()):
        load = {"load_id": 9, "slot": 0, "layer": 0, "expert": 1}
        data = odmoe_pb2.ToWorker(load=load, stamp={"due": 1.0, "sent": 0.5} | stamp).SerializeToString()
        with pytest.raises(ProtocolError, match=said):
            TO_WORKER.decode(data)


def test_a_stamp_alone_is_no_message():
    with pytest.raises(ProtocolError, match=r"ToWorker\.message is unset"):
        TO_WORKER.decode(odmoe_pb2.ToWorker(stamp={"due": 1.0}).SerializeToString())


def test_what_is_wrong_inside_a_stamped_message_is_named():
    with pytest.raises(ProtocolError, match=r"Compute\.slot is -1; allowed"):
        TO_WORKER.encode(Stamped(1.0, 0.5, "", replace(COMPUTE, slot=-1)))
    with pytest.raises(ProtocolError, match=r"ToWorker is Computed; allowed: Hello"):
        TO_WORKER.encode(Stamped(1.0, 0.5, "", Computed(1, TENSOR, 0.0)))
    with pytest.raises(ProtocolError, match=r"ToWorker is Stamped; allowed: Hello"):
        TO_WORKER.encode(Stamped(1.0, 0.5, "", Stamped(1.0, 0.5, "", COMPUTE)))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_are_refused(data):
    for codec, union in CARRIED:
        try:
            message = codec.decode(data)
        except ProtocolError:
            continue
        assert isinstance(message.message if isinstance(message, Stamped) else message, union)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_a_changed_byte_is_a_message_or_is_refused(at, value):
    data = bytearray(TO_WORKER.encode(COMPUTE))
    data[at % len(data)] = value
    try:
        message = TO_WORKER.decode(bytes(data))
    except ProtocolError:
        return
    if isinstance(message, Compute):
        assert len(message.hidden.data) == math.prod(message.hidden.shape) * DTYPE_BYTES[message.hidden.dtype]


def test_none_is_not_zero():
    for token in (None, 0):
        assert TO_SHADOW.decode(TO_SHADOW.encode(Align(1, 2, token, 0, ()))).token == token


# --- tensors that lie, as they come off the wire ---------------------------------------------------------------


def received(**hidden):
    """A `Compute` whose `hidden` is as told, past every check of a sender of ours."""
    fields = {"dtype": 1, "shape": [2, 3], "data": bytes(24)} | hidden
    weights = {"dtype": 1, "shape": [2], "data": bytes(8)}
    return odmoe_pb2.ToWorker(compute={"hidden": fields, "weights": weights}).SerializeToString()


@pytest.mark.parametrize(
    ("hidden", "said"),
    [
        ({"dtype": 0}, r"Compute\.hidden\.dtype is 0; allowed: 1 \(float32\)"),
        ({"dtype": 99}, r"Compute\.hidden\.dtype is 99"),
        ({"shape": [1] * 9}, r"Compute\.hidden\.shape is 9 dimensions; allowed: at most 8"),
        ({"data": bytes(23)}, r"Compute\.hidden\.data is 23 bytes; allowed: 24, for shape \(2, 3\) of float32"),
        ({"data": bytes(25)}, r"Compute\.hidden\.data is 25 bytes"),
        ({"data": b""}, r"Compute\.hidden\.data is 0 bytes"),
        ({"shape": []}, r"Compute\.hidden\.data is 24 bytes; allowed: 4, for shape \(\)"),
        (
            {"shape": [2**31, 2**31, 4]},
            r"Compute\.hidden\.shape is \(2147483648, 2147483648, 4\); allowed: at most 67108864 bytes",
        ),
        ({"shape": [2**31, 0], "data": b""}, r"Compute\.hidden\.shape is \(2147483648, 0\); allowed: at most 67108864"),
        (
            {"shape": [0, 2**20, 2**20], "data": b""},
            r"hidden\.shape is \(0, 1048576, 1048576\); allowed: at most",
        ),
        ({"shape": [2**32 - 1] * 8}, r"Compute\.hidden\.shape is \(4294967295, .*allowed: at most 67108864 bytes"),
    ],
)
def test_malformed_tensor_received(hidden, said):
    with pytest.raises(ProtocolError, match=said):
        TO_WORKER.decode(received(**hidden))


@pytest.mark.parametrize("shape", [(2**31, 0), (0, 2**13, 2**13)])
def test_a_size_is_not_hidden_by_a_dimension_of_none(shape):
    """Rows of no width would still be counted, and outputs made for them."""
    message = Compute(1, 0, 0, 0, Tensor("float32", shape, b""), TENSOR, False)
    with pytest.raises(ProtocolError, match=r"Compute\.hidden\.shape is .*; allowed: at most 67108864 bytes"):
        TO_WORKER.encode(message)


def test_missing_tensor_received():
    with pytest.raises(ProtocolError, match=r"Computed\.output\.dtype is 0"):
        FROM_WORKER.decode(odmoe_pb2.FromWorker(computed={"call_id": 1}).SerializeToString())


def test_malformed_tensor_among_several_is_named():
    good, bad = {"dtype": 6, "shape": [1], "data": b"x"}, {"dtype": 6, "shape": [2], "data": b"x"}
    with pytest.raises(ProtocolError, match=r"Align\.kv\[1\]\.data"):
        TO_SHADOW.decode(odmoe_pb2.ToShadow(align={"kv": [good, bad]}).SerializeToString())


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", r"ToWorker\.message is unset.*allowed: Hello, Load, Evict, Compute, AskUsage"),
        (b"\x62\x00", r"ToWorker\.message is unset, or of a kind unknown here"),  # field 12
        (b"\xff\xff\xff", r"ToWorker is 3 bytes that do not parse"),
        (b"\x0a\x04\x12\x02\xff\xfe", r"ToWorker is 6 bytes that do not parse"),  # Hello.fingerprint, not UTF-8
        (received()[:-1], r"ToWorker is \d+ bytes that do not parse"),
        (bytes(MAX_ENCODED_BYTES + 1), rf"ToWorker is {MAX_ENCODED_BYTES + 1} bytes; allowed: at most"),
    ],
    ids=["unset", "unknown", "garbage", "not UTF-8", "truncated", "oversize"],
)
def test_malformed_message_received(data, said):
    with pytest.raises(ProtocolError, match=said):
        TO_WORKER.decode(data)


# --- what a sender of ours may get wrong -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (replace(TENSOR, dtype="float8"), r"Compute\.hidden\.dtype is 'float8'; allowed: float32, float16"),
        (replace(TENSOR, data=bytes(20)), r"Compute\.hidden\.data is 20 bytes; allowed: 24"),
        (replace(TENSOR, data=memoryview(bytes(20)).cast("f")), r"Compute\.hidden\.data is 20 bytes"),
        (replace(TENSOR, data=bytearray(24)), r"Compute\.hidden\.data is a bytearray; allowed: bytes or memoryview"),
        (replace(TENSOR, shape=(1,) * 9), r"Compute\.hidden\.shape is 9 dimensions"),
        (replace(TENSOR, shape=(2, -3)), r"Compute\.hidden\.shape is \(2, -3\); allowed: each an integer from 0"),
        (Tensor("uint8", (MAX_MESSAGE_BYTES + 1,), b""), r"Compute\.hidden\.shape is \(67108865,\); allowed: at most"),
        (replace(TENSOR, shape=None), r"Compute\.hidden\.shape is None; allowed: each an integer from 0"),
        (replace(TENSOR, shape=(-2, -3)), r"Compute\.hidden\.shape is \(-2, -3\); allowed: each an integer from 0"),
        (replace(TENSOR, shape=(2.0, 3.0)), r"Compute\.hidden\.shape is \(2\.0, 3\.0\); allowed: each an integer"),
        (None, r"Compute\.hidden is None; allowed: a Tensor"),
    ],
)
def test_malformed_tensor_sent(tensor, said):
    with pytest.raises(ProtocolError, match=said):
        TO_WORKER.encode(replace(COMPUTE, hidden=tensor))


@pytest.mark.parametrize(
    ("codec", "message", "said"),
    [
        (TO_WORKER, replace(COMPUTE, slot=-1), r"Compute\.slot is -1; allowed: an integer from 0 to 4294967295"),
        (TO_WORKER, replace(COMPUTE, expert=2**32), r"Compute\.expert is 4294967296"),
        (TO_WORKER, replace(COMPUTE, call_id=2**64), r"Compute\.call_id is 18446744073709551616"),
        (TO_WORKER, replace(COMPUTE, layer=1.5), r"Compute\.layer is 1\.5"),
        (TO_WORKER, Hello("1", "", "", ""), r"Hello\.version is '1'"),
        (TO_WORKER, Hello(1, "\ud800", "", ""), r"Hello\.fingerprint is '\\ud800'; allowed: a string"),
        (FROM_WORKER, Loaded(1, 2, None), r"Loaded\.seconds is None; allowed: a float"),
        (
            TO_SHADOW,
            OpenRequest(1, (5, -1), 0, 1, 1, 1, 1, False),
            r"OpenRequest\.prompt is \(5, -1\); allowed: a sequence",
        ),
        (TO_SHADOW, Align(1, 0, -1, 0, ()), r"Align\.token is -1"),
        (FROM_SHADOW, Prediction(1, 0, 0, (1,), ("a",)), r"Prediction\.scores is \('a',\)"),
        (FROM_WORKER, Failed("E", "m", request=-1), r"Failed\.request is -1"),
        (TO_WORKER, Computed(1, TENSOR, 0.0), r"ToWorker is Computed; allowed: Hello, Load, Evict"),
        (FROM_SHADOW, "hello", r"FromShadow is str"),
    ],
)
def test_field_out_of_range_sent(codec, message, said):
    with pytest.raises(ProtocolError, match=said):
        codec.encode(message)


def test_tensors_too_large_together():
    half = Tensor("uint8", (MAX_MESSAGE_BYTES // 2 + 2**16,), bytes(MAX_MESSAGE_BYTES // 2 + 2**16))
    with pytest.raises(ProtocolError, match=r"ToShadow is \d+ bytes; allowed: at most \d+; send large tensors"):
        TO_SHADOW.encode(Align(1, 0, None, 0, (half, half)))

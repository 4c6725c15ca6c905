"""Messages to bytes and back, after proto/odmoe.proto: one `Codec` for each direction of a stream.

The tables are built from the proto's descriptors, which must agree with `wire.messages` field by field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from math import isfinite, prod
from operator import attrgetter
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from scheduler.errors import ProtocolError
from wire import messages, odmoe_pb2
from wire.messages import (
    DTYPE_BYTES,
    MAX_DIMS,
    MAX_ENCODED_BYTES,
    MAX_MESSAGE_BYTES,
    LocalTensor,
    Message,
    Stamped,
    Tensor,
)

_DTYPE_OF: dict[int, str] = {odmoe_pb2.Tensor.DType.Value(name.upper()): name for name in DTYPE_BYTES}
_ENUM_OF = {name: number for number, name in _DTYPE_OF.items()}

_ALLOWED = {
    FieldDescriptor.TYPE_UINT32: f"an integer from 0 to {2**32 - 1}",
    FieldDescriptor.TYPE_UINT64: f"an integer from 0 to {2**64 - 1}",
    FieldDescriptor.TYPE_DOUBLE: "a float",
    FieldDescriptor.TYPE_BOOL: "True or False",
    FieldDescriptor.TYPE_STRING: "a string of valid Unicode",
    FieldDescriptor.TYPE_BYTES: "bytes",
}


def _refuse(path: str, value: object, allowed: str) -> ProtocolError:
    return _refuse_text(path, repr(value), allowed)


def _refuse_text(path: str, text: str, allowed: str) -> ProtocolError:
    return ProtocolError(f"{path} is {text if len(text) <= 80 else text[:77] + '...'}; allowed: {allowed}")


def _alone(message: Callable[..., Any], name: str, value: Any, path: str, allowed: str) -> None:
    """Raises `ProtocolError` if protobuf rejects this field."""
    try:
        message(**{name: value})
    except (TypeError, ValueError, OverflowError):
        raise _refuse(path, value, allowed) from None


# --- tensors ---------------------------------------------------------------------------------------------------

_EACH = f"each {_ALLOWED[FieldDescriptor.TYPE_UINT32]}"
_PARTS = attrgetter("dtype", "shape", "data")  # each read of `data` makes protobuf copy it


def _refuse_size(path: str, dtype: str, shape: Sequence[int], nbytes: int) -> ProtocolError:
    if len(shape) > MAX_DIMS:
        return _refuse_text(f"{path}.shape", f"{len(shape)} dimensions", f"at most {MAX_DIMS}")
    want = prod(shape) * DTYPE_BYTES[dtype]
    if want > MAX_MESSAGE_BYTES or _hides_size(dtype, shape):
        return _refuse(f"{path}.shape", tuple(shape), f"at most {MAX_MESSAGE_BYTES} bytes; send it in parts")
    return _refuse_text(f"{path}.data", f"{nbytes} bytes", f"{want}, for shape {tuple(shape)} of {dtype}")


def _hides_size(dtype: str, shape: Sequence[int]) -> bool:
    """Whether a dimension of 0 hides others that no message has room for: what is made with them may be large."""
    return prod(n or 1 for n in shape) * DTYPE_BYTES[dtype] > MAX_MESSAGE_BYTES


def _write_tensor(path: str, tensor: Tensor | LocalTensor) -> dict[str, Any]:
    if isinstance(tensor, LocalTensor):
        dtype, shape, data = tensor.describe(tensor.local)
    elif isinstance(tensor, Tensor):
        dtype, shape, data = tensor.dtype, tensor.shape, tensor.data
    else:
        raise _refuse(path, tensor, "a Tensor")
    if dtype not in DTYPE_BYTES:
        raise _refuse(f"{path}.dtype", dtype, ", ".join(DTYPE_BYTES))
    if not isinstance(data, bytes):
        if not isinstance(data, memoryview):
            raise _refuse_text(f"{path}.data", f"a {type(data).__name__}", "bytes or memoryview")
        data = data.tobytes()
    nbytes = len(data)
    try:
        wrong = len(shape) > MAX_DIMS or prod(shape) * DTYPE_BYTES[dtype] != nbytes or nbytes > MAX_MESSAGE_BYTES
        if wrong or (not nbytes and _hides_size(dtype, shape)):
            _blame_shape(path, shape)
            raise _refuse_size(path, dtype, shape, nbytes)
    except TypeError:
        _blame_shape(path, shape)
        raise _refuse(f"{path}.shape", shape, _EACH) from None
    return {"dtype": _ENUM_OF[dtype], "shape": shape, "data": data}


def _blame_shape(path: str, shape: Any) -> None:
    """Raises `ProtocolError` for a shape that protobuf rejects; it checks a tensor's shape first."""
    _alone(odmoe_pb2.Tensor, "shape", shape, f"{path}.shape", _EACH)


def _read_tensor(path: str, pb: Any) -> Tensor:
    number, dims, data = _PARTS(pb)
    dtype = _DTYPE_OF.get(number)
    if dtype is None:
        raise _refuse(f"{path}.dtype", number, ", ".join(f"{n} ({name})" for n, name in _DTYPE_OF.items()))
    shape = tuple(dims[:])  # a list first, by one call of protobuf's
    nbytes = len(data)
    wrong = len(shape) > MAX_DIMS or prod(shape) * DTYPE_BYTES[dtype] != nbytes or nbytes > MAX_MESSAGE_BYTES
    if wrong or (not nbytes and _hides_size(dtype, shape)):
        raise _refuse_size(path, dtype, shape, nbytes)
    return Tensor(dtype, shape, data)


def _write_tensors(path: str, tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [_write_tensor(f"{path}[{i}]", tensor) for i, tensor in enumerate(tensors)]


def _read_tensors(path: str, parts: Sequence[Any]) -> tuple[Tensor, ...]:
    return tuple([_read_tensor(f"{path}[{i}]", part) for i, part in enumerate(parts)])


# --- one kind of message ---------------------------------------------------------------------------------------


class _Kind:
    """How one message class is written and read.

    All fields go to and from protobuf in one call: a Python loop over them takes as long as gRPC takes for 16 KB. If
    protobuf rejects the message, `blame` finds the field.
    """

    def __init__(self, cls: Callable[..., Message], descriptor: Descriptor) -> None:
        self._cls = cls
        self._names = _same_names(cls, descriptor)
        self._get = _getter(self._names)
        self._message = getattr(odmoe_pb2, descriptor.name)
        self._path = {name: f"{descriptor.name}.{name}" for name in self._names}
        self._allowed = {fd.name: _allowed_type(fd) for fd in descriptor.fields}
        self._optional = [fd.name for fd in descriptor.fields if fd.message_type is None and fd.has_presence]
        self._puts: list[tuple[str, str, Callable[[str, Any], Any]]] = []
        self._takes: list[tuple[int, str, Callable[[str, Any], Any]]] = []
        for at, fd in enumerate(descriptor.fields):
            path = self._path[fd.name]
            if fd.message_type is not None:
                self._puts.append((fd.name, path, _write_tensors if fd.is_repeated else _write_tensor))
                self._takes.append((at, path, _read_tensors if fd.is_repeated else _read_tensor))
            elif fd.is_repeated:
                self._takes.append((at, path, _read_many))

    def write(self, message: Message) -> dict[str, Any]:
        """Arguments for protobuf's constructor."""
        values = dict(zip(self._names, self._get(message), strict=True))
        for name, path, put in self._puts:
            values[name] = put(path, values[name])
        if None in values.values():  # protobuf would silently omit it
            self._leave_out(values)
        return values

    def _leave_out(self, values: dict[str, Any]) -> None:
        for name in [name for name, value in values.items() if value is None]:
            if name not in self._optional:
                raise _refuse(self._path[name], None, self._allowed[name])
            del values[name]

    def blame(self, values: dict[str, Any]) -> None:
        """Raises `ProtocolError` naming the first value that protobuf rejects."""
        for name, path, put in self._puts:
            if put is _write_tensor:
                _blame_shape(path, values[name]["shape"])
            else:
                for i, part in enumerate(values[name]):
                    _blame_shape(f"{path}[{i}]", part["shape"])
        for name, value in values.items():
            _alone(self._message, name, value, self._path[name], self._allowed[name])

    def read(self, pb: Any) -> Message:
        """Raises `ProtocolError` for an invalid tensor."""
        values = self._get(pb)
        if self._takes or self._optional:
            values = list(values)
            for at, path, take in self._takes:
                values[at] = take(path, values[at])
            for name in self._optional:
                if not pb.HasField(name):
                    values[self._names.index(name)] = None
        return self._cls(*values)


def _read_many(path: str, values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(values)


def _getter(names: tuple[str, ...]) -> Callable[[Any], Sequence[Any]]:
    """All these attributes of an object, in one call."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda owner: [getattr(owner, name) for name in names]


def _allowed_type(fd: FieldDescriptor) -> str:
    one = _ALLOWED.get(fd.type, "a Tensor")
    return f"a sequence, each {one}" if fd.is_repeated else one


def _same_names(cls: Any, descriptor: Descriptor) -> tuple[str, ...]:
    ours, theirs = [f.name for f in dataclasses.fields(cls)], [fd.name for fd in descriptor.fields]
    if ours != theirs:
        raise TypeError(f"{cls.__name__}: wire/messages.py has {ours}, proto/odmoe.proto has {theirs}")
    return tuple(ours)


# --- stamps ----------------------------------------------------------------------------------------------------


def _write_stamp(stamped: Stamped) -> dict[str, Any]:
    for path, value in (("due", stamped.due), ("sent", stamped.sent)):
        if not isinstance(value, float | int) or not isfinite(value):
            raise _refuse(f"Stamped.{path}", value, "a finite number of seconds")
    if not isinstance(stamped.machine, str):
        raise _refuse("Stamped.machine", stamped.machine, _ALLOWED[FieldDescriptor.TYPE_STRING])
    _alone(odmoe_pb2.Stamp, "machine", stamped.machine, "Stamped.machine", _ALLOWED[FieldDescriptor.TYPE_STRING])
    return {"due": stamped.due, "sent": stamped.sent, "machine": stamped.machine}


def _read_stamp(pb: Any, message: Any) -> Stamped:
    for path, value in (("due", pb.due), ("sent", pb.sent)):
        if not isfinite(value):
            raise _refuse(f"Stamped.{path}", value, "a finite number of seconds")
    return Stamped(pb.due, pb.sent, pb.machine, message)


class Codec:
    """Encodes and decodes the messages that one envelope of the proto (ToWorker, ...) can carry."""

    def __init__(self, envelope: Any) -> None:
        self._envelope = envelope
        self._name: str = envelope.DESCRIPTOR.name
        self._by_type: dict[type, tuple[str, _Kind]] = {}
        self._by_arm: dict[str, _Kind] = {}
        for arm in envelope.DESCRIPTOR.oneofs_by_name["message"].fields:
            cls = getattr(messages, arm.message_type.name)
            kind = _Kind(cls, arm.message_type)
            self._by_type[cls] = arm.name, kind
            self._by_arm[arm.name] = kind

    def carries(self, cls: type) -> bool:
        """Whether a message of this class may be sent this way."""
        return cls in self._by_type

    def encode(self, message: Message) -> bytes:
        """Raises `ProtocolError` for a message of another direction, an invalid field, or too many bytes."""
        stamp: dict[str, Any] = {}
        if isinstance(message, Stamped):
            stamp, message = {"stamp": _write_stamp(message)}, message.message
        entry = self._by_type.get(type(message))
        if entry is None:
            raise _refuse_text(self._name, type(message).__name__, self._names())
        arm, kind = entry
        values = kind.write(message)
        try:
            outer = self._envelope(**{arm: values}, **stamp)
        except (TypeError, ValueError, OverflowError):
            kind.blame(values)
            raise
        data: bytes = outer.SerializeToString()
        if len(data) > MAX_ENCODED_BYTES:
            raise self._too_large(len(data))
        return data

    def decode(self, data: bytes) -> Message:
        """Raises `ProtocolError` for bytes that are no message of this direction, or for an invalid field."""
        if len(data) > MAX_ENCODED_BYTES:
            raise self._too_large(len(data))
        try:
            outer = self._envelope.FromString(data)
        except DecodeError as error:
            raise _refuse_text(
                self._name, f"{len(data)} bytes that do not parse", f"{self._names()} ({error})"
            ) from None
        arm = outer.WhichOneof("message")
        if arm is None:
            raise _refuse_text(f"{self._name}.message", "unset, or of a kind unknown here", self._names())
        message = self._by_arm[arm].read(getattr(outer, arm))
        if outer.HasField("stamp"):
            return _read_stamp(outer.stamp, message)
        return message

    def _too_large(self, size: int) -> ProtocolError:
        return _refuse_text(self._name, f"{size} bytes", f"at most {MAX_ENCODED_BYTES}; send large tensors in parts")

    def _names(self) -> str:
        return ", ".join(cls.__name__ for cls in self._by_type)


TO_WORKER = Codec(odmoe_pb2.ToWorker)
FROM_WORKER = Codec(odmoe_pb2.FromWorker)
TO_SHADOW = Codec(odmoe_pb2.ToShadow)
FROM_SHADOW = Codec(odmoe_pb2.FromShadow)
TO_STAGE = Codec(odmoe_pb2.ToStage)
FROM_STAGE = Codec(odmoe_pb2.FromStage)

"""Messages to bytes and back, after proto/odmoe.proto: one `Codec` for each direction of a stream.

The tables are built from the proto's descriptors, which must agree with `wire.messages` field by field.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from scheduler.errors import ProtocolError
from wire import messages, odmoe_pb2
from wire.messages import DTYPE_BYTES, MAX_DIMS, MAX_MESSAGE_BYTES, Message, Tensor

MAX_ENCODED_BYTES = MAX_MESSAGE_BYTES + 64 * 1024
"""A message with `MAX_MESSAGE_BYTES` of tensors, and what else it says."""

_DTYPE_OF: dict[int, str] = {odmoe_pb2.Tensor.DType.Value(name.upper()): name for name in DTYPE_BYTES}
_ENUM_OF = {name: number for number, name in _DTYPE_OF.items()}

_ALLOWED = {
    FieldDescriptor.TYPE_UINT32: f"an integer from 0 to {2**32 - 1}",
    FieldDescriptor.TYPE_UINT64: f"an integer from 0 to {2**64 - 1}",
    FieldDescriptor.TYPE_DOUBLE: "a float",
    FieldDescriptor.TYPE_BOOL: "True or False",
    FieldDescriptor.TYPE_STRING: "a string of valid Unicode",
}

_Put = Callable[[Any, "_Field", Any], None]
_Take = Callable[[Any, "_Field"], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """How one field is written to (`put`) and read from (`take`) a protobuf message."""

    name: str
    path: str
    allowed: str
    put: _Put
    take: _Take


def _refuse(path: str, value: object, allowed: str) -> ProtocolError:
    return _refuse_text(path, repr(value), allowed)


def _refuse_text(path: str, text: str, allowed: str) -> ProtocolError:
    return ProtocolError(f"{path} is {text if len(text) <= 80 else text[:77] + '...'}; allowed: {allowed}")


# --- scalars ---------------------------------------------------------------------------------------------------


def _put_scalar(pb: Any, field: _Field, value: Any) -> None:
    try:
        setattr(pb, field.name, value)
    except (TypeError, ValueError, OverflowError):
        raise _refuse(field.path, value, field.allowed) from None


def _take_scalar(pb: Any, field: _Field) -> Any:
    return getattr(pb, field.name)


def _put_optional(pb: Any, field: _Field, value: Any) -> None:
    if value is not None:
        _put_scalar(pb, field, value)


def _take_optional(pb: Any, field: _Field) -> Any:
    return getattr(pb, field.name) if pb.HasField(field.name) else None


def _put_many(pb: Any, field: _Field, values: Sequence[Any]) -> None:
    try:
        getattr(pb, field.name).extend(values)
    except (TypeError, ValueError, OverflowError):
        raise _refuse(field.path, values, f"a sequence, each {field.allowed}") from None


def _take_many(pb: Any, field: _Field) -> tuple[Any, ...]:
    return tuple(getattr(pb, field.name))


# --- tensors ---------------------------------------------------------------------------------------------------


def _check_size(path: str, dtype: str, shape: Sequence[int], nbytes: int) -> None:
    if len(shape) > MAX_DIMS:
        raise _refuse_text(f"{path}.shape", f"{len(shape)} dimensions", f"at most {MAX_DIMS}")
    want = math.prod(shape) * DTYPE_BYTES[dtype]
    if want > MAX_MESSAGE_BYTES:
        raise _refuse(f"{path}.shape", tuple(shape), f"at most {MAX_MESSAGE_BYTES} bytes; send it in parts")
    if nbytes != want:
        raise _refuse_text(f"{path}.data", f"{nbytes} bytes", f"{want}, for shape {tuple(shape)} of {dtype}")


def _write_tensor(pb: Any, path: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise _refuse(path, tensor, "a Tensor")
    if tensor.dtype not in _ENUM_OF:
        raise _refuse(f"{path}.dtype", tensor.dtype, ", ".join(DTYPE_BYTES))
    data = tensor.data
    if not isinstance(data, (bytes, memoryview)):
        raise _refuse_text(f"{path}.data", f"a {type(data).__name__}", "bytes or memoryview")
    try:
        pb.shape.extend(tensor.shape)
    except (TypeError, ValueError, OverflowError):
        raise _refuse(f"{path}.shape", tensor.shape, f"each {_ALLOWED[FieldDescriptor.TYPE_UINT32]}") from None
    _check_size(path, tensor.dtype, tensor.shape, data.nbytes if isinstance(data, memoryview) else len(data))
    pb.dtype = _ENUM_OF[tensor.dtype]
    pb.data = data if isinstance(data, bytes) else data.tobytes()


def _read_tensor(pb: Any, path: str) -> Tensor:
    dtype = _DTYPE_OF.get(pb.dtype)
    if dtype is None:
        raise _refuse(f"{path}.dtype", pb.dtype, ", ".join(f"{n} ({name})" for n, name in _DTYPE_OF.items()))
    data = pb.data  # protobuf makes a new bytes object each time it is asked
    _check_size(path, dtype, pb.shape, len(data))
    return Tensor(dtype, tuple(pb.shape), data)


def _put_tensor(pb: Any, field: _Field, tensor: Tensor) -> None:
    _write_tensor(getattr(pb, field.name), field.path, tensor)


def _take_tensor(pb: Any, field: _Field) -> Tensor:
    return _read_tensor(getattr(pb, field.name), field.path)


def _put_tensors(pb: Any, field: _Field, tensors: Sequence[Tensor]) -> None:
    parts = getattr(pb, field.name)
    for i, tensor in enumerate(tensors):
        _write_tensor(parts.add(), f"{field.path}[{i}]", tensor)


def _take_tensors(pb: Any, field: _Field) -> tuple[Tensor, ...]:
    return tuple(_read_tensor(part, f"{field.path}[{i}]") for i, part in enumerate(getattr(pb, field.name)))


# --- tables ----------------------------------------------------------------------------------------------------


def _ways(fd: FieldDescriptor) -> tuple[_Put, _Take]:
    if fd.message_type is not None:
        return (_put_tensors, _take_tensors) if fd.is_repeated else (_put_tensor, _take_tensor)
    if fd.is_repeated:
        return _put_many, _take_many
    return (_put_optional, _take_optional) if fd.has_presence else (_put_scalar, _take_scalar)


def _fields(cls: type, descriptor: Descriptor) -> tuple[_Field, ...]:
    ours, theirs = [f.name for f in dataclasses.fields(cls)], [fd.name for fd in descriptor.fields]
    if ours != theirs:
        raise TypeError(f"{cls.__name__}: wire/messages.py has {ours}, proto/odmoe.proto has {theirs}")
    return tuple(
        _Field(fd.name, f"{cls.__name__}.{fd.name}", _ALLOWED.get(fd.type, ""), *_ways(fd)) for fd in descriptor.fields
    )


class Codec:
    """Encodes and decodes the messages that one envelope of the proto (ToWorker, ...) can carry."""

    def __init__(self, envelope: Any) -> None:
        self._envelope = envelope
        self._name: str = envelope.DESCRIPTOR.name
        self._by_type: dict[type, tuple[str, tuple[_Field, ...]]] = {}
        self._by_arm: dict[str, tuple[Callable[..., Message], tuple[_Field, ...]]] = {}
        for arm in envelope.DESCRIPTOR.oneofs_by_name["message"].fields:
            cls = getattr(messages, arm.message_type.name)
            fields = _fields(cls, arm.message_type)
            self._by_type[cls] = arm.name, fields
            self._by_arm[arm.name] = cls, fields

    @property
    def carries(self) -> tuple[type, ...]:
        """The message classes of this direction."""
        return tuple(self._by_type)

    def encode(self, message: Message) -> bytes:
        """Raises `ProtocolError` for a message of another direction, a field that cannot be, or too many bytes."""
        entry = self._by_type.get(type(message))
        if entry is None:
            raise _refuse_text(self._name, type(message).__name__, self._names())
        arm, fields = entry
        outer = self._envelope()
        inner = getattr(outer, arm)  # filled in place: assigning a finished submessage would copy it
        inner.SetInParent()
        for field in fields:
            field.put(inner, field, getattr(message, field.name))
        data: bytes = outer.SerializeToString()
        self._check_total(len(data))
        return data

    def decode(self, data: bytes) -> Message:
        """Raises `ProtocolError` for bytes that are not a message of this direction, or a field that cannot be."""
        self._check_total(len(data))
        try:
            outer = self._envelope.FromString(data)
        except DecodeError as error:
            raise _refuse_text(
                self._name, f"{len(data)} bytes that do not parse", f"{self._names()} ({error})"
            ) from None
        arm = outer.WhichOneof("message")
        if arm is None:
            raise _refuse_text(f"{self._name}.message", "unset, or of a kind unknown here", self._names())
        cls, fields = self._by_arm[arm]
        inner = getattr(outer, arm)
        return cls(*[field.take(inner, field) for field in fields])

    def _check_total(self, size: int) -> None:
        if size > MAX_ENCODED_BYTES:
            raise _refuse_text(self._name, f"{size} bytes", f"at most {MAX_ENCODED_BYTES}; send large tensors in parts")

    def _names(self) -> str:
        return ", ".join(cls.__name__ for cls in self._by_type)


TO_WORKER = Codec(odmoe_pb2.ToWorker)
FROM_WORKER = Codec(odmoe_pb2.FromWorker)
TO_SHADOW = Codec(odmoe_pb2.ToShadow)
FROM_SHADOW = Codec(odmoe_pb2.FromShadow)

"""Frames for fuzzing: valid messages of one direction, changed field by field after the proto's descriptors, or byte by
byte. The same seed gives the same frames."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from wire.codec import Codec
from wire.messages import Message

WHOLE = (0, 1, 2, 3, 4, 7, 8, 255, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1)
LARGE = (*WHOLE, 2**40, 2**63, 2**64 - 1)
NUMBERS = (0.0, -0.0, 1.0, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "\0", "int4", "cpu", "x" * 3000, "é" * 300, "../../etc", "{}", "ProtocolError")
COUNTS = (0, 1, 2, 9, 200)
SIZES = (0, 1, 2, 3, 8, 64, 1000, 20_000)
DTYPES = (*range(8), 99)


class Frames:
    """Frames of one direction. `seeds`: valid messages, from which they are made."""

    def __init__(self, codec: Codec, seeds: Sequence[Message], seed: int) -> None:
        self._envelope = codec._envelope
        self._seeds = [codec.encode(message) for message in seeds]
        self._rng = random.Random(seed)

    def take(self, count: int) -> Iterator[bytes]:
        for _ in range(count):
            yield self._frame()

    def _frame(self) -> bytes:
        rng = self._rng
        kind = rng.random()
        if kind < 0.03:
            return rng.randbytes(rng.choice((0, 1, 2, 10, 300)))
        message = self._envelope.FromString(rng.choice(self._seeds))
        if kind > 0.15:
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                self._change(message)
        data: bytes = message.SerializeToString()
        return self._damage(data) if kind > 0.8 else data

    # --- fields -------------------------------------------------------------------------------------------------

    def _change(self, message: Any) -> None:
        """Change one field of a message, or of one within it."""
        set_fields = [field for field, _ in message.ListFields()]
        inner = [field for field in set_fields if field.message_type is not None and not field.is_repeated]
        if inner and self._rng.random() < 0.85:
            self._change(getattr(message, self._rng.choice(inner).name))
            return
        if not message.DESCRIPTOR.fields:
            return
        field = self._rng.choice(list(message.DESCRIPTOR.fields))
        if field.is_repeated:
            self._change_many(getattr(message, field.name), field)
        elif field.message_type is not None:
            self._change_part(message, field)
        else:
            setattr(message, field.name, self._value(field))

    def _change_part(self, message: Any, field: FieldDescriptor) -> None:
        if self._rng.random() < 0.3:
            message.ClearField(field.name)
        else:
            part = getattr(message, field.name)
            part.SetInParent()
            self._change(part)

    def _change_many(self, values: Any, field: FieldDescriptor) -> None:
        rng = self._rng
        if len(values) and rng.random() < 0.6:
            at = rng.randrange(len(values))
            if field.message_type is not None:
                self._change(values[at])
            elif rng.random() < 0.3:
                del values[at]
            else:
                values[at] = self._value(field)
            return
        for _ in range(rng.choice(COUNTS)):
            if field.message_type is not None:
                values.add()
            else:
                values.append(self._value(field))

    def _value(self, field: FieldDescriptor) -> Any:
        rng = self._rng
        kinds: dict[int, Any] = {
            FieldDescriptor.TYPE_UINT32: lambda: rng.choice(WHOLE),
            FieldDescriptor.TYPE_UINT64: lambda: rng.choice(LARGE),
            FieldDescriptor.TYPE_DOUBLE: lambda: rng.choice(NUMBERS),
            FieldDescriptor.TYPE_BOOL: lambda: rng.random() < 0.5,
            FieldDescriptor.TYPE_STRING: lambda: rng.choice(TEXTS),
            FieldDescriptor.TYPE_BYTES: lambda: rng.randbytes(rng.choice(SIZES)),
            FieldDescriptor.TYPE_ENUM: lambda: rng.choice(DTYPES),
        }
        return kinds[field.type]()

    # --- bytes --------------------------------------------------------------------------------------------------

    def _damage(self, data: bytes) -> bytes:
        rng = self._rng
        found = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(found) + 1)
            match rng.randrange(4):
                case 0 if at < len(found):
                    found[at] ^= 1 << rng.randrange(8)
                case 1:
                    del found[at : at + rng.choice((1, 2, 50))]
                case 2:
                    found[at:at] = rng.randbytes(rng.choice((1, 2, 50)))
                case _:
                    found[at:at] = found[at : at + 20]
        return bytes(found)

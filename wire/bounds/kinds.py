"""The kinds of bounds that a field may have. Each knows a value at its limit, and values just over it, for tests."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import isfinite
from typing import Any, NamedTuple

from wire.messages import MAX_DIMS, LocalTensor, Tensor

U32, U64 = 2**32 - 1, 2**64 - 1
FLOATS = ("float32", "float16", "bfloat16")

_LONG = 1 << 20
"""Longer sequences are not made as examples."""


class Bound(NamedTuple):
    """What a field's value may be."""

    holds: Callable[[Any], bool]
    allowed: str
    """For the error."""
    limit: Callable[[], Any]
    """Makes a value at the limit."""
    over: Callable[[], tuple[Any, ...]]
    """Makes values just over it."""
    native: bool = False
    """Protobuf's own type is as narrow: the codec refuses what is over it."""


def whole(most: int, least: int = 0) -> Bound:
    """An integer."""
    return Bound(
        lambda value: least <= value <= most,
        f"an integer from {least} to {most}",
        lambda: most,
        lambda: (most + 1, least - 1),
    )


def number() -> Bound:
    """An id, or another number of 64 bits."""
    return whole(U64)._replace(native=True)


def one_of(values: Collection[Any], allowed: str) -> Bound:
    """One of a few values; any where none are known."""
    kept = frozenset(values)
    if not kept:
        return whole(U32)
    over = (max(kept) + 1,) if all(isinstance(value, int) for value in kept) else ("no such value",)
    return Bound(kept.__contains__, allowed, lambda: max(kept), lambda: over)


def seconds(most: float) -> Bound:
    """A duration, or a rate: finite and not negative."""
    return Bound(
        lambda value: 0.0 <= value <= most,
        f"a finite number from 0 to {most:g}",
        lambda: most,
        lambda: (most * 1.001, -1e-9, float("inf"), float("nan")),
    )


def finite() -> Bound:
    """A moment, or a score: any finite number."""
    over = (float("inf"), float("-inf"), float("nan"))
    return Bound(isfinite, "a finite number", lambda: -1e308, lambda: over)


def flag() -> Bound:
    """True or False."""
    return Bound(
        lambda value: value is True or value is False, "True or False", lambda: True, lambda: ("yes",), native=True
    )


def text(most: int) -> Bound:
    """A string of at most `most` characters."""
    return Bound(
        lambda value: len(value) <= most,
        f"at most {most} characters",
        lambda: "x" * most,
        lambda: ("x" * (most + 1),),
    )


def optional(bound: Bound) -> Bound:
    """None, or what the bound allows."""
    return bound._replace(holds=lambda value: value is None or bound.holds(value))


def many(each: Bound, most: int, least: int = 0) -> Bound:
    """A sequence whose values have bounds of their own."""
    holds = each.holds

    def over() -> tuple[tuple[Any, ...], ...]:
        longer: tuple[tuple[Any, ...], ...] = ((each.limit(),) * (most + 1),) if most <= _LONG else ()
        shorter: tuple[tuple[Any, ...], ...] = ((),) if least else ()
        return (*longer, *shorter, *((value,) for value in each.over()))

    return Bound(
        lambda values: least <= len(values) <= most and all(map(holds, values)),
        f"{least} to {most} values, each {each.allowed}",
        lambda: (each.limit(),) * max(least, 1),
        over,
    )


def wholes(most_each: int, most: int, least: int = 0) -> Bound:
    """A sequence of integers from 0 to `most_each`."""

    def holds(values: Any) -> bool:
        return least <= len(values) <= most and (not values or (min(values) >= 0 and max(values) <= most_each))

    return many(whole(most_each), most, least)._replace(holds=holds)


def size(most: int) -> Bound:
    """Bytes."""
    return Bound(lambda value: len(value) <= most, f"at most {most} bytes", lambda: b"x", lambda: ())


def tensor(*dims: Bound) -> Bound:
    """A tensor of floats with one or two dimensions. One of this process has been on no wire, and is not looked at."""
    count = len(dims)
    first, *rest = (dim.holds for dim in dims)
    last = rest[-1] if rest else first

    def holds(value: Tensor | LocalTensor) -> bool:
        if isinstance(value, LocalTensor):
            return True
        shape = value.shape
        return len(shape) == count and first(shape[0]) and last(shape[-1]) and value.dtype in FLOATS

    def fits() -> tuple[int, ...]:
        return tuple(1 if dim.holds(1) else dim.limit() for dim in dims)

    def over() -> tuple[Tensor, ...]:
        fit = fits()
        shapes = [(*fit[:at], n, *fit[at + 1 :]) for at, dim in enumerate(dims) for n in dim.over() if n >= 0]
        return (*(Tensor("float32", shape, b"") for shape in (*shapes, (*fit, 1))), Tensor("int64", fit, b""))

    described = " and ".join(dim.allowed for dim in dims)
    allowed = f"floats with {count} dimension{'s' * (count > 1)}: {described}"
    return Bound(holds, allowed, lambda: Tensor("float32", fits(), b""), over)


def any_tensor(most: int) -> Bound:
    """A tensor of any dtype, no dimension of which is above `most`."""

    def holds(value: Tensor | LocalTensor) -> bool:
        return isinstance(value, LocalTensor) or (len(value.shape) <= MAX_DIMS and max(value.shape, default=0) <= most)

    over = (Tensor("float32", (0, most + 1), b""), Tensor("float32", (0,) * (MAX_DIMS + 1), b""))
    limit = Tensor("float32", (0, most), b"")
    return Bound(holds, f"at most {MAX_DIMS} dimensions of at most {most}", lambda: limit, lambda: over)

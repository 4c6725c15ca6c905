"""Ways to keep bfloat16 weights in fewer bytes without losing a bit. Packages that are not installed are left out.

A weight's 8 bits of exponent take few values and compress; its sign and 7 bits of mantissa are noise and do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
BLOCK = 1 << 17
"""Values that are put together at once, so that they stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Codec:
    """`compress` gives what `restore` takes, and its bytes. `restore` writes the weights' bytes to memory that it is
    given, as a worker's slot."""

    name: str
    compress: Callable[[Bytes], tuple[Any, int]]
    restore: Callable[[Any, Bytes], None]


def exponent_entropy(data: Bytes) -> float:
    """Bits that an exponent of these bfloat16 weights needs at least, each for itself."""
    counts = np.bincount(_planes(data)[0], minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def _planes(data: Bytes) -> tuple[Bytes, Bytes]:
    """Exponents, and sign and mantissa, a byte of each for every weight."""
    values = data.view(np.uint16)
    turned = (values << 1) | (values >> 15)  # the exponent is the high byte, the sign the lowest bit
    return (turned >> 8).astype(np.uint8), (turned & 0xFF).astype(np.uint8)


def _join(exponents: Bytes, rest: Bytes, into: Bytes) -> None:
    """The inverse of `_planes`."""
    values = into.view(np.uint16)
    low = np.empty(BLOCK, np.uint16)
    for first in range(0, len(values), BLOCK):
        out = values[first : first + BLOCK]
        bytewise = out.view(np.uint8)
        bytewise[0::2] = rest[first : first + BLOCK]
        bytewise[1::2] = exponents[first : first + BLOCK]
        sign = np.left_shift(out, 15, out=low[: len(out)])
        np.right_shift(out, 1, out=out)
        np.bitwise_or(out, sign, out=out)


def copy() -> Codec:
    """Nothing is compressed: what a copy in memory takes."""
    return Codec("copy", lambda data: (data.copy(), len(data)), lambda held, into: np.copyto(into, held))


def _zstd(level: int, planes: bool) -> Codec:
    import zstandard

    def compress(data: Bytes) -> bytes:
        return zstandard.ZstdCompressor(level=level).compress(data.tobytes())

    def restore(held: bytes, into: Bytes) -> None:
        stream = zstandard.ZstdDecompressor().stream_reader(held)
        at, view = 0, memoryview(into)
        while at < len(into):
            at += stream.readinto(view[at:])

    return _of(f"zstd -{level}", compress, restore, planes)


def _lz4(planes: bool) -> Codec:
    import lz4.block

    def compress(data: Bytes) -> bytes:
        return bytes(lz4.block.compress(data.tobytes(), store_size=False))

    def restore(held: bytes, into: Bytes) -> None:
        into[:] = np.frombuffer(lz4.block.decompress(held, uncompressed_size=len(into)), np.uint8)

    return _of("lz4", compress, restore, planes)


def _of(name: str, compress: Callable[[Bytes], bytes], restore: Callable[[bytes, Bytes], None], planes: bool) -> Codec:
    """A compressor of bytes, for all bytes or for the exponents."""
    if not planes:

        def whole(data: Bytes) -> tuple[bytes, int]:
            held = compress(data)
            return held, len(held)

        return Codec(f"{name}, all bytes", whole, restore)

    def split(data: Bytes) -> tuple[tuple[bytes, Bytes], int]:
        exponents, rest = _planes(data)
        held = compress(exponents)
        return (held, rest), len(held) + len(rest)

    def joined(held: tuple[bytes, Bytes], into: Bytes) -> None:
        exponents = np.empty(len(into) // 2, np.uint8)
        restore(held[0], exponents)
        _join(exponents, held[1], into)

    return Codec(f"{name}, exponents", split, joined)


def _zipnn() -> Codec:
    """Its own Huffman coder for exponents, in C."""
    from zipnn import ZipNN

    coder = ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)

    def compress(data: Bytes) -> tuple[Any, int]:
        held = coder.compress(bytearray(data.tobytes()))
        return held, len(held)

    def restore(held: Any, into: Bytes) -> None:
        into[:] = np.frombuffer(coder.decompress(held), np.uint8)

    return Codec("zipnn", compress, restore)


def four_bits() -> Codec:
    """The fifteen most frequent exponents in 4 bits each; weights with others are kept beside them. NumPy only."""

    def compress(data: Bytes) -> tuple[Any, int]:
        exponents, rest = _planes(data)
        usual = np.argsort(np.bincount(exponents, minlength=256))[::-1][:15].astype(np.uint8)
        code = np.full(256, 15, np.uint8)
        code[usual] = np.arange(15, dtype=np.uint8)
        codes = code[exponents]
        others = np.flatnonzero(codes == 15).astype(np.uint32)
        packed = codes[0::2] | (codes[1::2] << 4)
        of_code = np.append(usual, np.uint8(0))
        pairs = of_code[np.arange(256) & 15].astype(np.uint16) | (of_code[np.arange(256) >> 4].astype(np.uint16) << 8)
        held = (packed, rest, pairs, others, exponents[others])
        return held, sum(part.nbytes for part in held)

    def restore(held: Any, into: Bytes) -> None:
        packed, rest, pairs, others, lost = held
        exponents = np.take(pairs, packed).view(np.uint8)
        exponents[others] = lost
        _join(exponents, rest, into)

    return Codec("4 bits an exponent", compress, restore)


PACKAGES: dict[str, list[Callable[[], Codec]]] = {
    "zstandard": [lambda: _zstd(1, False), lambda: _zstd(3, False), lambda: _zstd(1, True)],
    "lz4": [lambda: _lz4(False), lambda: _lz4(True)],
    "zipnn": [_zipnn],
}
"""What needs a package, by its module."""


def codecs() -> tuple[list[Codec], list[str]]:
    """All that can run here, and the packages that are missing for others."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    packaged = [make() for name, makers in PACKAGES.items() if name not in missing for make in makers]
    return [copy(), four_bits(), *packaged], missing


def times_shorter(ratio: float, restore: float, link: float, overlapped: bool) -> float:
    """How many times shorter a load becomes. `ratio`: compressed over original bytes; `restore`, `link`: original bytes
    a second that are restored and that are moved. Overlapped: pieces are restored while others move."""
    moved, restored = ratio / link, 1 / restore
    taken = max(moved, restored) if overlapped else moved + restored
    return 1 / link / taken if taken else math.inf

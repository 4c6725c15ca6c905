"""Compiled routines that restore rows of a weight in one pass, or multiply a row with a weight that is not restored.
numba compiles them for this CPU.

They compute in integers where torch multiplies: a value and a scale of MXFP4 are a few bits and an exponent. No
compiler has to be installed. Each process compiles anew, for about a second. numba's cache is not used: what it holds
may be damaged, or be of another CPU or version where several processes write to it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import config, float32, njit, types, uint16, uint32
from numba.extending import intrinsic

from checkpoint.native.product_scratch import PAIRS

if config.DISABLE_JIT:
    raise ImportError("numba compiles nothing where NUMBA_DISABLE_JIT is set; unset it")  # Python would take minutes


def compiled(function: Callable[..., Any], contract: bool = False, reassociates: bool = False) -> Any:
    """`function`, compiled at its first call. It does not hold Python's lock while it runs.

    `contract`: a product and a sum may be rounded once, which is faster. To be used where the product is exact.
    `reassociates`: so may sums be, in any order, which is faster still, and not the order of any other product.
    """
    allowed = {"contract", "reassoc"} if reassociates else {"contract"} if contract else False
    return njit(nogil=True, fastmath=allowed)(function)


@compiled
def _two_values(code: Any, exponents: Any) -> Any:
    """The bits of a byte's two values in bfloat16, the earlier in the low half. `exponents`: for each half the bits of
    its scale times 0.5, 0x3f00 for a scale of 1.

    In bfloat16 the codes 2 to 7 are 0x3f00 + (code << 6): the exponent and the mantissa are next to each other. 1 is
    0x3f00, and 0 is 0. A scale adds to the exponent. So two values are computed at once in a word of 32 bits.
    """
    two = uint32(code)
    two = uint32((two | two << 12) & 0x000F000F)
    number = uint32(two & 0x00070007)
    some = uint32((number + 0x00070007) & 0x00080008)  # 8 where the number is 1 or more
    more = uint32((number + 0x00060006) & 0x00080008)  # 8 where it is 2 or more
    exponent = exponents & uint32((some << 13) - (some >> 3))
    mantissa = uint32(number << 6) & uint32((more << 7) - (more << 3))
    return uint32(uint32((two & 0x00080008) << 12) | uint32(exponent + mantissa))


@compiled
def mxfp4(target: Any, codes: Any, scales: Any, factors: Any, table: Any) -> None:
    """target: uint32 [rows, columns / 2], two bfloat16 each; codes: uint8 [rows, columns / 2], the earlier value in the
    low bits; scales: uint8 [rows / 32, columns]; factors: uint32 [columns / 2], scratch; table: uint16 [256, 16], the
    bits of each value times each scale."""
    pairs = len(factors)
    for block in range(len(scales)):
        edge = False
        scale = scales[block]
        for pair in range(pairs):
            low, high = uint32(scale[2 * pair]), uint32(scale[2 * pair + 1])
            edge |= (low < 2) | (low > 252) | (high < 2) | (high > 252)
            factors[pair] = ((low - 1) & 0xFF) << 7 | ((high - 1) & 0xFF) << 23  # 0x3f00 + (scale - 127 << 7)
        for row in range(32 * block, 32 * block + 32):
            values, code = target[row], codes[row]
            for pair in range(pairs):
                values[pair] = _two_values(code[pair], factors[pair])
        if edge:
            for pair in range(pairs):
                low, high = scale[2 * pair], scale[2 * pair + 1]
                if low < 2 or low > 252 or high < 2 or high > 252:  # a value may be subnormal or infinite
                    for row in range(32 * block, 32 * block + 32):
                        code = codes[row, pair]
                        target[row, pair] = uint32(table[low, code & 15]) | uint32(table[high, code >> 4]) << 16


_ONES = 0x3F003F00
"""The exponents of `_two_values` where both scales are 1."""


@intrinsic
def _bits_of_float(_context: Any, _value: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def _float_of_bits(_context: Any, _bits: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@compiled
def _rounded(value: Any) -> Any:
    """The bits of a finite float32 in bfloat16: to the nearest, ties to even."""
    bits = _bits_of_float(value)
    return uint16(uint32(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@partial(compiled, contract=True)
def mxfp4_product(found: Any, row: Any, codes: Any, scales: Any, sums: Any, first: int, last: int) -> None:
    """found: uint16 [columns], the bfloat16 of row times weight in the pairs of columns `first` to `last`; row: uint16
    [rows], bfloat16; codes: uint8 [rows, columns / 2]; scales: uint8 [rows / 32, columns]; sums: float32 [6, PAIRS],
    scratch. To be used where no product or sum is subnormal or infinite.

    Adds in the order of AMX (TDPBF16PS in Intel's Software Developer's Manual): of 32 rows, those with even numbers and
    those with odd numbers are summed up apart, one after the other, and their sum is added to the column's. A product
    with a value of MXFP4 is exact in float32, and a scale changes exponents only, so 32 rows are scaled once.
    """
    for start in range(first, last, PAIRS):
        count = min(PAIRS, last - start)
        low, high, even_low, even_high, odd_low, odd_high = (
            sums[0, :count],
            sums[1, :count],
            sums[2, :count],
            sums[3, :count],
            sums[4, :count],
            sums[5, :count],
        )
        low[:] = 0
        high[:] = 0
        for block in range(len(scales)):
            sums[2:, :count] = 0
            for number in range(32 * block, 32 * block + 32, 2):
                even, odd = _float_of_bits(uint32(row[number]) << 16), _float_of_bits(uint32(row[number + 1]) << 16)
                of_even, of_odd = codes[number, start : start + count], codes[number + 1, start : start + count]
                for pair in range(count):
                    two = _two_values(of_even[pair], uint32(_ONES))
                    even_low[pair] += even * _float_of_bits(uint32(two << 16))
                    even_high[pair] += even * _float_of_bits(uint32(two & 0xFFFF0000))
                    two = _two_values(of_odd[pair], uint32(_ONES))
                    odd_low[pair] += odd * _float_of_bits(uint32(two << 16))
                    odd_high[pair] += odd * _float_of_bits(uint32(two & 0xFFFF0000))
            scale = scales[block, 2 * start : 2 * (start + count)]
            for pair in range(count):
                low[pair] += (even_low[pair] + odd_low[pair]) * _float_of_bits(uint32(scale[2 * pair]) << 23)
                high[pair] += (even_high[pair] + odd_high[pair]) * _float_of_bits(uint32(scale[2 * pair + 1]) << 23)
        for pair in range(count):
            found[2 * (start + pair)] = _rounded(low[pair])
            found[2 * (start + pair) + 1] = _rounded(high[pair])


@compiled
def fp8(target: Any, codes: Any, scales: Any, factors: Any) -> None:
    """target: uint16 [rows, columns], a bfloat16 each; codes: uint8 [rows, columns], E4M3; scales: float32, one for
    each block of a grid; factors: float32 [columns], scratch.

    E4M3 without its sign, shifted to the places of a float32, lacks 120 in its exponent: the biases are 7 and 127. The
    codes 1 to 7 are subnormal, multiples of 2^-9. The product is rounded to the nearest, ties to even. It must be
    finite.
    """
    rows, columns = target.shape
    grid_rows, grid_columns = scales.shape
    height, width = rows // grid_rows, columns // grid_columns
    for block in range(grid_rows):
        for part in range(grid_columns):
            for column in range(part * width, (part + 1) * width):
                factors[column] = scales[block, part]
        for row in range(block * height, (block + 1) * height):
            values, code = target[row], codes[row]
            for column in range(columns):
                number = uint32(code[column] & 0x7F)
                normal = _float_of_bits(uint32(uint32(number << 20) + uint32(120 << 23)))
                subnormal = float32(number) * float32(2.0**-9)
                value = subnormal if number < 8 else normal
                values[column] = _rounded(value * factors[column]) ^ uint16(uint16(code[column] & 0x80) << 8)


@compiled
def _float_of_half(bits: Any) -> Any:
    """A finite float16 as float32. Without its sign, shifted to the places of a float32, it lacks 112 in its exponent;
    the first 1024 are subnormal, multiples of 2^-24."""
    number = uint32(bits & 0x7FFF)
    normal = _float_of_bits(uint32(uint32(number << 13) + uint32(112 << 23)))
    value = float32(number) * float32(2.0**-24) if number < 1024 else normal
    return _float_of_bits(uint32(_bits_of_float(value) | uint32(uint32(bits & 0x8000) << 16)))


def _form_restorer(converted: Any) -> Any:
    """Of HQQ's numbers (checkpoint/forms.py): (number - zero) * scale, `converted` from float32."""

    @compiled
    def restore(target: Any, packed: Any, scale: Any, zero: Any, bits: int, first: int, last: int) -> None:
        """target: [n]; packed: uint8 [rows, group], of which `first` to `last` are restored; scale and zero: uint16
        [rows * 8 / bits], float16. Each place in a byte has rows of its own, the highest bits the first."""
        rows, group = packed.shape
        mask = (1 << bits) - 1
        for place in range(8 // bits):
            shift = 8 - bits * (place + 1)
            for row in range(first, last):
                begin = (place * rows + row) * group
                count = min(group, len(target) - begin)
                if count <= 0:
                    break
                values, numbers = target[begin : begin + count], packed[row]
                factor, origin = _float_of_half(scale[place * rows + row]), _float_of_half(zero[place * rows + row])
                for column in range(count):
                    number = float32((numbers[column] >> shift) & mask)
                    values[column] = converted(float32(number - origin) * factor)

    return restore


@compiled
def _unchanged(value: Any) -> Any:
    return value


form_in_bfloat16 = _form_restorer(_rounded)
form_in_float32 = _form_restorer(_unchanged)

"""How experts are quantised while a checkpoint is sharded (`--experts int4 --group 32`, `--experts mxfp4`). Without
torch."""

from __future__ import annotations

from dataclasses import dataclass

BITS = {"int4": 4, "int8": 8}
MXFP4 = "mxfp4"
GROUPS = (32, 64, 128)
DEFAULT_GROUP = 64
_MXFP4_GROUP, _MXFP4_BITS, _MXFP4_SCALE_BITS = 32, 4, 8
_SCALE_BITS = 16
"""Of a group's scale, and of its minimum where it has one."""


@dataclass(frozen=True)
class Quantisation:
    """Integers, or MXFP4, in groups of a row's neighbouring inputs.

    int4 has a scale and a minimum for each group, found by HQQ. int8 has a scale, and is rounded to nearest. MXFP4 has
    a power of two for each 32 inputs, always.
    """

    name: str
    group: int
    """Inputs. See `group_of`."""

    @staticmethod
    def of(experts: str | None) -> Quantisation | None:
        """By a value of `experts`: `int4`, or `int4-32` with a group other than the default. None for any other."""
        if experts == MXFP4:
            return Quantisation(MXFP4, _MXFP4_GROUP)
        name, _, group = (experts or "").partition("-")
        return Quantisation(name, int(group or DEFAULT_GROUP)) if name in BITS else None

    @property
    def experts(self) -> str:
        """The value of `experts`, with the group."""
        return self.name if self.is_mxfp4 else f"{self.name}-{self.group}"

    @property
    def described(self) -> str:
        return self.name if self.is_mxfp4 else f"{self.name} in groups of {self.group}"

    @property
    def flags(self) -> str:
        """Of `odmoe shard`."""
        return f"--experts {self.name}" + (f" --group {self.group}" if not self.is_mxfp4 else "")

    @property
    def is_mxfp4(self) -> bool:
        return self.name == MXFP4

    @property
    def bits(self) -> int:
        """Of a number."""
        return _MXFP4_BITS if self.is_mxfp4 else BITS[self.name]

    @property
    def has_minimums(self) -> bool:
        return self.name == "int4"

    def group_of(self, columns: int) -> int:
        """The inputs in a group of a row with so many: the largest of `GROUPS` up to `group` that divides them. 0 where
        none does."""
        return max((size for size in GROUPS if size <= self.group and columns % size == 0), default=0)

    def bits_of(self, hidden: int, inner: int, up_rows: int) -> float:
        """Of an element of an expert: a matrix [up_rows, hidden] and one [hidden, inner]. 0 where a row has no
        groups."""
        level_bits = _MXFP4_SCALE_BITS if self.is_mxfp4 else _SCALE_BITS * (1 + self.has_minimums)
        values = side = 0.0
        for rows, columns in ((up_rows, hidden), (hidden, inner)):
            if not (size := self.group_of(columns)):
                return 0.0
            values += rows * columns
            side += rows * (columns // size) * level_bits
        return self.bits + side / values

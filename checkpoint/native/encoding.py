"""What an encoding is: how a store keeps an expert's published numbers, and how parameters are restored from them.

A weight NAME of an encoded expert becomes some tensors of the blob, its *parts*: `NAME.codes`, `NAME.scales`, and what
else its encoding needs. Other parameters, such as biases, stay as they are. An encoding loses nothing: restored
parameters have the bits of the dequantised ones. It may put numbers into another order than the publisher, so that
restoring writes each parameter from its first value to its last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import ClassVar, TypeVar

import torch

from checkpoint.native.routine_check import Routine, checked_routine
from checkpoint.native.threads import together
from checkpoint.tensors import round_up

CODES, SCALES = "codes", "scales"
Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Tensors by name: dtype and shape."""

Parts = Mapping[str, torch.Tensor]
"""Tensors of one weight, by the names that `Encoding.parts` lists."""

CheckWeight = tuple[tuple[int, int], Parts]
"""Shape and parts."""

PIECE = 1 << 17
"""Values that a CPU restores at a time: as many as fit into its second cache, with what they are made from."""

DEVICE_PIECE = 1 << 24
_ALIGN = 64

Found = TypeVar("Found")


class Unencodable(ValueError):
    """These numbers cannot be encoded; the message says why."""


class Encoding(ABC):
    """One encoding. It has no state."""

    name: str
    table_bytes: ClassVar[int] = 0
    """Bytes of tables that restoring reads. All who restore on a device share them."""
    parts: ClassVar[tuple[str, ...]] = (CODES, SCALES)
    """Of each encoded weight."""
    more_parts: ClassVar[tuple[str, ...]] = ()
    """Of some encoded weights."""
    compiled_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)
    """Of the weights that the compiled routine restores."""

    inputs_first: ClassVar[bool] = False
    """Whether weights are [in, out]."""

    def stored_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Of a weight as its codes lie: the weight's own, or that of its transpose."""
        return shape

    @abstractmethod
    def encode(self, published: Parts) -> dict[str, torch.Tensor]:
        """The parts of one weight of n experts, each [n, ...], from the published numbers, scales and so on under the
        same names.

        Raises Unencodable.
        """

    @abstractmethod
    def scratch_bytes(self, shape: tuple[int, ...], piece: int) -> int:
        """Bytes of scratch memory for restoring a weight of this shape, about `piece` values at a time."""

    @abstractmethod
    def restore(self, target: torch.Tensor, parts: Parts, scratch: torch.Tensor, piece: int) -> None:
        """Fill `target`, the rows of a weight that some rows of scales multiply, and that is contiguous.

        `parts`: theirs. `scratch`: uint8, at least `scratch_bytes` long. With torch alone: on a GPU, and where no
        compiled routine restores.
        """

    @abstractmethod
    def routine(self, dtype: torch.dtype = torch.bfloat16) -> Routine:
        """The compiled routine for weights of a dtype, one of `compiled_dtypes`, unchecked.

        It may raise what numba raises, also at its first call.
        """

    @abstractmethod
    def restores_compiled(self, shape: tuple[int, ...]) -> bool:
        """Whether the compiled routine restores weights of this shape."""

    @abstractmethod
    def check_weights(self) -> list[CheckWeight]:
        """Weights with all numbers, and with scales from the least to the largest, in each dtype of scales."""

    @abstractmethod
    def fits_weight(self, shape: tuple[int, ...], parts: Shapes) -> bool:
        """Whether a weight of this shape can be restored from such parts. None of those that each has is missing."""

    def described(self, full: Shapes, native: Shapes) -> str:
        """The encoding's name, with what these parameters in these tensors say of it."""
        return self.name

    def fits(self, full: Shapes, native: Shapes) -> bool:
        """Whether the parameters `full` can be restored from a blob with the tensors `native`."""
        rest = dict(native)
        for name, parameter in full.items():
            if name in rest:
                if rest.pop(name) != parameter:
                    return False
                continue
            parts = self.parts_of(name, rest)
            for part in parts:
                del rest[f"{name}.{part}"]
            if any(part not in parts for part in self.parts) or not self.fits_weight(parameter[1], parts):
                return False
        return not rest

    def parts_of(self, name: str, tensors: Mapping[str, Found]) -> dict[str, Found]:
        """The parts of a weight among the tensors of a blob."""
        names = ((part, f"{name}.{part}") for part in (*self.parts, *self.more_parts))
        return {part: tensors[full] for part, full in names if full in tensors}

    def restore_into(
        self, full: dict[str, torch.Tensor], native: dict[str, torch.Tensor], scratch: torch.Tensor
    ) -> None:
        """Fill the parameters `full` from the tensors of an encoded blob. Allocates nothing that stays, and does not
        wait for a GPU. `scratch`: uint8 [threads, n], see `scratch_for`."""
        piece = piece_on(scratch.device)
        for name, target in full.items():
            if name in native:
                target.copy_(native[name])
                continue
            parts = self.parts_of(name, native)
            routine = self._routine_of(target)
            restore = routine or partial(self.restore, piece=piece)
            for shares in self.shares(target, parts, len(scratch)):
                jobs = [partial(restore, *share, scratch[number]) for number, share in enumerate(shares)]
                if len(jobs) == 1 and (torch.get_num_threads() == 1 or scratch.device.type != "cpu"):
                    jobs[0]()
                else:
                    together(jobs, with_caller=routine is not None)

    def shares(self, target: torch.Tensor, parts: Parts, threads: int) -> Iterator[list[tuple[torch.Tensor, Parts]]]:
        """A weight's shares for threads that restore it together. What is yielded later is restored later."""
        yield shares_of_rows(target, parts, threads)

    def checked_routine(self, dtype: torch.dtype) -> Routine | None:
        """The compiled routine for weights of this dtype on a CPU, compared with `restore`. None: `restore` is used."""
        if dtype not in self.compiled_dtypes:
            return None
        name = self.name if self.compiled_dtypes == (dtype,) else f"{self.name} in {dtype}"
        return checked_routine(name, partial(self.routine, dtype), partial(self.is_equal, dtype=dtype))

    def is_equal(self, routine: Routine, dtype: torch.dtype = torch.bfloat16) -> bool:
        """Whether a routine gives the bits of `restore` for `check_weights`."""
        return all(self._has_same_bits(routine, dtype, *weight) for weight in self.check_weights())

    def _has_same_bits(self, routine: Routine, dtype: torch.dtype, shape: tuple[int, int], parts: Parts) -> bool:
        piece = shape[0] * shape[1]
        scratch = torch.empty(self.scratch_bytes(shape, piece), dtype=torch.uint8)
        found, expected = torch.empty(2, *shape, dtype=dtype)
        routine(found, parts, scratch)
        self.restore(expected, parts, scratch, piece)
        return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))

    def _routine_of(self, target: torch.Tensor) -> Routine | None:
        if target.device.type != "cpu" or not self.restores_compiled(tuple(target.shape)):
            return None
        return self.checked_routine(target.dtype)

    def scratch_for(self, shapes: Iterable[tuple[int, ...]], device: str, threads: int) -> tuple[int, int]:
        """The shape of the scratch memory for restoring weights of these shapes on `device`: threads, bytes for each.

        `threads`: how many restore at the same time. On a GPU it is one.
        """
        each = max((self.scratch_bytes(shape, piece_on(torch.device(device))) for shape in shapes), default=0)
        return threads if device == "cpu" else 1, round_up(each, _ALIGN)


def shares_of_rows(target: torch.Tensor, parts: Parts, threads: int) -> list[tuple[torch.Tensor, Parts]]:
    """A share of the rows for each thread. Fewer shares where there are fewer rows of scales.

    A part with as many rows as the scales, or the codes, is divided; any other is everybody's.
    """
    blocks = parts[SCALES].shape[0]
    each = -(-blocks // threads)
    height, codes = target.shape[0] // blocks, parts[CODES].view(-1)
    places = codes.numel() // blocks
    shares: list[tuple[torch.Tensor, Parts]] = []
    for first in range(0, blocks, each):
        last = min(first + each, blocks)
        theirs = {name: part[first:last] if len(part) == blocks else part for name, part in parts.items()}
        theirs[CODES] = codes[first * places : last * places]
        shares.append((target[first * height : last * height], theirs))
    return shares


def first_bytes(scratch: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The first bytes of scratch memory. Compiled routines check no bounds. Raises ValueError where it is shorter."""
    if len(scratch) < nbytes:
        raise ValueError(f"scratch memory has {len(scratch)} bytes; needed: {nbytes}")
    return scratch[:nbytes]


def piece_on(device: torch.device) -> int:
    return PIECE if device.type == "cpu" else DEVICE_PIECE


def rows_at_once(rows: int, block: int, columns: int, piece: int, even: int = 1) -> int:
    """How many rows to restore at a time: a divisor of `block`, or a multiple of it, with about `piece` values.

    `even`: the number of values is a multiple of it, if that of a block is.
    """
    most = max(piece // max(columns, 1), 1)
    if most >= block:
        return min(most // block * block, rows)
    fits = [n for n in range(1, block + 1) if block % n == 0 and n * columns % even == 0]
    return max((n for n in fits if n <= most), default=min(fits, default=block))

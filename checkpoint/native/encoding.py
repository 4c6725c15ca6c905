"""What an encoding is: how a store keeps an expert's published numbers, and how parameters are restored from them.

A weight NAME of an encoded expert becomes two tensors of the blob, `NAME.codes` and `NAME.scales`. Other parameters,
such as biases, stay as they are. An encoding loses nothing: restored parameters have the bits of those that
Transformers dequantises. It may put numbers into another order than the publisher, so that restoring writes each
parameter from its first value to its last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from typing import ClassVar

import torch

from checkpoint.native.routine_check import Routine, checked_routine
from checkpoint.native.threads import together
from checkpoint.tensors import round_up

CODES, SCALES = "codes", "scales"
Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Tensors by name: dtype and shape."""

CheckWeight = tuple[tuple[int, int], torch.Tensor, torch.Tensor]
"""Shape, codes and scales."""

PIECE = 1 << 17
"""Values that a CPU restores at a time: as many as fit into its second cache, with what they are made from."""

DEVICE_PIECE = 1 << 24
_ALIGN = 64


class Unencodable(ValueError):
    """These numbers cannot be encoded; the message says why."""


class Encoding(ABC):
    """One encoding. It has no state."""

    name: ClassVar[str]
    table_bytes: ClassVar[int] = 0
    """Bytes of tables that restoring reads. All who restore on a device share them."""

    @abstractmethod
    def encode(self, numbers: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes and scales, each [n, ...], of one weight of n experts, from the published tensors.

        Raises Unencodable.
        """

    @abstractmethod
    def scratch_bytes(self, shape: tuple[int, ...], piece: int) -> int:
        """Bytes of scratch memory for restoring a weight of this shape, about `piece` values at a time."""

    @abstractmethod
    def restore(
        self, target: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, scratch: torch.Tensor, piece: int
    ) -> None:
        """Fill `target`, the rows of a weight that some rows of `scales` multiply, and that is contiguous.

        `codes`: theirs. `scratch`: uint8, at least `scratch_bytes` long. With torch alone: on a GPU, and where no
        compiled routine restores.
        """

    @abstractmethod
    def routine(self) -> Routine:
        """The compiled routine for bfloat16, unchecked. It may raise what numba raises, also at its first call."""

    @abstractmethod
    def restores_compiled(self, shape: tuple[int, ...]) -> bool:
        """Whether the compiled routine restores weights of this shape."""

    @abstractmethod
    def check_weights(self) -> list[CheckWeight]:
        """Weights with all numbers, and with scales from the least to the largest, in each dtype of scales."""

    @abstractmethod
    def fits_weight(
        self, shape: tuple[int, ...], codes: tuple[str, tuple[int, ...]], scales: tuple[str, tuple[int, ...]]
    ) -> bool:
        """Whether a weight of this shape can be restored from codes and scales of these dtypes and shapes."""

    def fits(self, full: Shapes, native: Shapes) -> bool:
        """Whether the parameters `full` can be restored from a blob with the tensors `native`."""
        rest = dict(native)
        for name, parameter in full.items():
            if name in rest:
                if rest.pop(name) != parameter:
                    return False
                continue
            codes, scales = rest.pop(f"{name}.{CODES}", None), rest.pop(f"{name}.{SCALES}", None)
            if codes is None or scales is None or not self.fits_weight(parameter[1], codes, scales):
                return False
        return not rest

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
            codes, scales = native[f"{name}.{CODES}"], native[f"{name}.{SCALES}"]
            routine = self._routine_of(target)
            restore = routine or partial(self.restore, piece=piece)
            parts = [partial(restore, *part) for part in _parts(target, codes, scales, scratch)]
            if len(parts) == 1 and (torch.get_num_threads() == 1 or scratch.device.type != "cpu"):
                parts[0]()
            else:
                together(parts, with_caller=routine is not None)

    def checked_routine(self, dtype: torch.dtype) -> Routine | None:
        """The compiled routine for weights of this dtype on a CPU, compared with `restore`. None: `restore` is used."""
        if dtype is not torch.bfloat16:
            return None
        return checked_routine(self.name, self.routine, self.is_equal)

    def is_equal(self, routine: Routine) -> bool:
        """Whether a routine gives the bits of `restore` for `check_weights`."""
        return all(self._has_same_bits(routine, *weight) for weight in self.check_weights())

    def _has_same_bits(
        self, routine: Routine, shape: tuple[int, int], codes: torch.Tensor, scales: torch.Tensor
    ) -> bool:
        piece = shape[0] * shape[1]
        scratch = torch.empty(self.scratch_bytes(shape, piece), dtype=torch.uint8)
        found, expected = torch.empty(2, *shape, dtype=torch.bfloat16)
        routine(found, codes, scales, scratch)
        self.restore(expected, codes, scales, scratch, piece)
        return torch.equal(found.view(torch.int16), expected.view(torch.int16))

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


def _parts(
    target: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, scratch: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A part of a weight for each thread: target, codes, scales, scratch. Fewer where it has fewer rows of scales."""
    blocks, codes = scales.shape[0], codes.view(-1)
    each = -(-blocks // len(scratch))
    for number, first in enumerate(range(0, blocks, each)):
        last = min(first + each, blocks)
        rows, places = target.shape[0] // blocks, codes.numel() // blocks
        part = target[first * rows : last * rows]
        yield part, codes[first * places : last * places], scales[first:last], scratch[number]


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

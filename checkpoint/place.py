"""Where the bytes of a tensor are in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """A tensor's bytes: `nbytes` from `start` of `file`. `dtype` in the words of safetensors."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def rows(self, first: int, last: int) -> Place:
        """Rows first..last - 1 of the leading dimension: a contiguous part."""
        row = self.nbytes // self.shape[0]
        shape = (last - first, *self.shape[1:])
        return replace(self, shape=shape, start=self.start + first * row, nbytes=(last - first) * row)

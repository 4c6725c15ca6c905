"""One model that is on this machine."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

CHECKPOINT, STORE, SHIPPED = "checkpoint", "store", "shipped"
"""Kinds: as it was published; as experts are loaded from it; a checkpoint that came with OD-MoE."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint or a store.

    `format`: dtype, published format or encoding and forms, or its fault. `dense`: that of the layers outside of the
    experts, where it differs. `last_used`: seconds since 1970.
    """

    name: str
    kind: str
    family: str
    format: str
    dense: str
    bytes: int
    last_used: float
    path: str
    model: str = ""
    """Of a store: the model that it was last used for."""


def size_of_folder(path: Path) -> int:
    """Bytes of the files below a folder, or of a file; links count nothing."""
    total = 0
    for file in [path] if path.is_file() else path.rglob("*"):
        with contextlib.suppress(OSError):  # it went meanwhile
            if file.is_file() and (file == path or not file.is_symlink()):
                total += file.stat().st_size
    return total

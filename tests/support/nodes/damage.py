"""Damage to the files of a store."""

from __future__ import annotations

import os
from pathlib import Path

from checkpoint.store import ExpertStore


def flip(store: ExpertStore, layer: int, expert: int, form: str = "", at: int | None = None) -> Path:
    """One bit of the expert's bytes, in the middle or in byte `at`, is another from now on; a second flip mends it.
    Returns its file."""
    path, blob = store.locate(layer, expert, form)
    with path.open("r+b") as stream:
        stream.seek(blob.offset + (blob.length // 2 if at is None else at))
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 16]))
    return path

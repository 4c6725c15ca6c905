"""Parts of a store for workers, in folders beside it, to be copied by hand. `odmoe up` copies them by itself."""

from __future__ import annotations

import math
import os
from pathlib import Path

from checkpoint.part_files import expert_sizes, write_part
from checkpoint.store import ExpertStore
from odmoe.stores import Progress
from scheduler.errors import StoreWriteError
from scheduler.store_parts import missing_parts


def make_parts(store: ExpertStore, parts: int, replicas: int, progress: Progress) -> dict[str, object]:
    """Write so many parts of a store, `replicas` of which hold each expert; facts of them. Raises StoreError."""
    sizes, folder = expert_sizes(store), store.path.with_name(f"{store.path.name}-parts")
    names = {f"part-{number}": math.inf for number in range(parts)}
    wanted = missing_parts(sizes, names, replicas, {})
    _check_room(folder, sum(sizes[expert] for some in wanted.values() for expert in some))
    total, done = replicas * sum(sizes.values()), 0

    def step(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress("parts", done, total)

    for name, experts in wanted.items():
        write_part(store, folder / name, experts, step)
    largest = max(sum(sizes[expert] for expert in some) for some in wanted.values())
    whole = sum(sizes.values()) + sum(file.stat().st_size for file in store.dense.iterdir())
    return {
        "parts": parts,
        "replicas": replicas,
        "parts_folder": str(folder),
        "largest_part_bytes": largest,
        "largest_part_of_store": round(largest / whole, 4),
    }


def _check_room(folder: Path, needed: int) -> None:
    status = os.statvfs(folder.parent)
    free = status.f_bavail * status.f_frsize
    if needed > free and not folder.exists():
        raise StoreWriteError(
            f"the parts in {folder} need {needed:,} bytes, {free:,} are free there; make room, or choose another place"
        )

"""How fast a disk fills slots, and a processor reads them, by how their memory lies.

    .venv/bin/python -m scripts.measure.slots

Slots of one area, as this engine allocates them, and each in a piece of its own, in fresh memory and in a process whose
free memory is scattered pages, as it is after hours of work: every other page of an area is freed in a random order.
Four kinds in turns; figures are medians over the turns, ratios those of the same turn.
"""

from __future__ import annotations

import argparse
import mmap
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from checkpoint.store import ExpertStore
from checkpoint.tensors import PAGE, aligned_buffer
from odmoe.settings.settings import available_cores
from scripts.lib.clusters import open_model
from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import RESULTS
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table
from scripts.models.widen import widened_copy
from worker_node.loaders.disk import DiskLoader
from worker_node.slots import Slots

INPUTS = 256
"""Of a product's matrix, whose bytes are all of a slot."""


def scattered(nbytes: int) -> mmap.mmap:
    """An area of which every other page was given back to the kernel. As long as it lives, free memory is scattered."""
    area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_NOHUGEPAGE)
    torch.frombuffer(area, dtype=torch.uint8)[::PAGE] = 1
    pages = list(range(0, nbytes // PAGE, 2))
    random.Random(0).shuffle(pages)
    for page in pages:
        area.madvise(mmap.MADV_DONTNEED, page * PAGE, PAGE)
    return area


def huge_share(buffers: list[torch.Tensor]) -> float:
    """How much of their mappings is in huge pages, as the kernel says."""
    places = {buffer.data_ptr() for buffer in buffers}
    size = huge = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if not head.endswith(":"):
            low, high = (int(end, 16) for end in head.split("-"))
            inside = any(low <= place < high for place in places)
        elif inside and head == "Size:":
            size += int(rest.split()[0])
        elif inside and head == "AnonHugePages:":
            huge += int(rest.split()[0])
    return huge / size


class Filled:
    """Slots that are filled and read again and again."""

    def __init__(self, store: ExpertStore, memory: str, slots: str, buffers: list[torch.Tensor]) -> None:
        self.row: dict[str, Any] = {"memory": memory, "slots": slots, "huge": huge_share(buffers)}
        # Each kind reads experts of its own, as the disk may have a cache.
        self._buffers, self._loader, self._drawn = buffers, DiskLoader(store), random.Random(f"{memory} {slots}")
        self._experts = [(n, e) for n, layer in store.manifest.layers.items() for e in range(len(layer.blobs))]

    def read_s_per_gb(self) -> float:
        """Every slot is filled once, with drawn experts."""
        drawn = [self._drawn.choice(self._experts) for _ in self._buffers]
        began = time.perf_counter()
        for buffer, one in zip(self._buffers, drawn, strict=True):
            self._loader.load(*one, buffer, lambda: False)
        return (time.perf_counter() - began) / sum(buffer.nbytes for buffer in self._buffers) * 1e9

    def product_s_per_gb(self) -> float:
        """A product of one row with each slot as a matrix of bfloat16."""
        row = torch.ones(1, INPUTS, dtype=torch.bfloat16)
        matrices = [one[: one.nbytes // (2 * INPUTS) * 2 * INPUTS].view(torch.bfloat16) for one in self._buffers]
        began = time.perf_counter()
        with torch.inference_mode():
            for matrix in matrices:
                functional.linear(row, matrix.view(-1, INPUTS))
        return (time.perf_counter() - began) / sum(matrix.nbytes for matrix in matrices) * 1e9

    def close(self) -> None:
        self._loader.close()


def pieces(count: int, nbytes: int) -> list[torch.Tensor]:
    return [aligned_buffer(nbytes) for _ in range(count)]


def measured(store: ExpertStore, count: int, turns: int, held: int) -> list[dict[str, Any]]:
    """A row a kind."""
    nbytes = store.manifest.blob_bytes
    kinds = [
        Filled(store, "fresh", "one area", Slots(count, nbytes).buffers),
        Filled(store, "fresh", "pieces", pieces(count, nbytes)),
    ]
    area = scattered(held)
    kinds += [
        Filled(store, "scattered", "one area", Slots(count, nbytes).buffers),
        Filled(store, "scattered", "pieces", pieces(count, nbytes)),
    ]
    found: dict[str, list[list[float]]] = {"read": [], "product": []}
    for turn in range(turns):
        order = [(turn + n) % len(kinds) for n in range(len(kinds))]
        read = {at: kinds[at].read_s_per_gb() for at in order}
        product = {at: kinds[at].product_s_per_gb() for at in order}
        for of, times in (("read", read), ("product", product)):
            found[of].append([times[at] for at in range(len(kinds))])
    area.close()
    for one in kinds:
        one.close()
    for of, every in found.items():
        for at, one in enumerate(kinds):
            one.row[f"{of}_s_per_gb"] = statistics.median(turn_s[at] for turn_s in every)
            one.row[f"{of}_ratio"] = statistics.median(turn_s[at] / turn_s[0] for turn_s in every)
    return [one.row | {"slot_bytes": nbytes, "count": count} for one in kinds]


COLUMNS = (
    Column("free memory", "memory"),
    Column("slots", "slots"),
    Column("in huge pages", "huge", ".0%"),
    Column("filled from the disk, s/GB", "read_s_per_gb", ".2f"),
    Column("of the first", "read_ratio", ".2f"),
    Column("read by products, s/GB", "product_s_per_gb", ".3f"),
    Column("of the first", "product_ratio", ".2f"),
)


def parse() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/many-moe"))
    parser.add_argument("--widen", type=positive, default=16, help="experts N times as large (scripts.models.widen)")
    parser.add_argument("--slots", type=positive, default=128)
    parser.add_argument("--turns", type=positive, default=9)
    parser.add_argument("--held", type=positive, default=1 << 30, help="bytes of the area that scatters free memory")
    return parser.parse_args()


def main() -> int:
    args = parse()
    header("Slots by how their memory lies")
    torch.set_num_threads(available_cores())
    model = widened_copy(args.model, args.widen, RESULTS / "models") if args.widen > 1 else args.model
    store, _ = open_model(argparse.Namespace(model=str(model)), "bfloat16")
    rows = measured(store, args.slots, args.turns, args.held)
    print(text_table(COLUMNS, rows))
    print(f"saved: {save_rows('slots', rows)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

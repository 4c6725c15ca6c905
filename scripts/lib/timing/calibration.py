"""How fast the machine itself was when something was measured.

Others on the same host slow a virtual machine's processor or disk without a trace in its own counts. The same small
work before each answer shows it: two runs of which one was done on a slower machine can be told apart.
"""

from __future__ import annotations

import random
import statistics
import time

import torch

from checkpoint.store import ExpertStore
from checkpoint.tensors import aligned_buffer
from odmoe.settings.settings import available_cores
from worker_node.loaders.disk import DiskLoader

SIDE = 1024
MATRICES = 12
"""bfloat16 of 25 MB: more than a core's cache has, as with the experts of a token."""
TURNS = 15
READS = 16
HUGE = 1 << 21
"""Bytes of a huge page."""
SPEEDS = ("product_s", "read_s_per_gb")


class Calibration:
    """Work that is always the same: products of one row on all cores, and experts of a store read from the disk, in a
    drawn order. It takes some 50 ms."""

    def __init__(self, store: ExpertStore, seed: int = 0) -> None:
        self._loader = DiskLoader(store)
        self._experts = [(n, e) for n, layer in store.manifest.layers.items() for e in range(len(layer.blobs))]
        self._sizes = {one: store.locate(*one)[1].length for one in self._experts}
        self._into = aligned_buffer(max(HUGE, *self._sizes.values()))  # pages must not lie otherwise in another run
        self._drawn = random.Random(seed)
        self._row = torch.ones(1, SIDE, dtype=torch.bfloat16)
        weights = aligned_buffer(2 * MATRICES * SIDE * SIDE).view(torch.bfloat16)
        self._matrices = weights.fill_(1.0).view(MATRICES, SIDE, SIDE).unbind()

    def speeds(self) -> dict[str, float]:
        """`product_s`: seconds of a product, the median of `TURNS` times all of them. `read_s_per_gb`: seconds in which
        a gigabyte of experts is read. Leaves torch with all cores."""
        torch.set_num_threads(available_cores())
        return dict(zip(SPEEDS, (self._product_s(), self._read_s_per_gb()), strict=True))

    def _product_s(self) -> float:
        found = []
        with torch.inference_mode():
            for _ in range(TURNS):
                began = time.perf_counter()
                for matrix in self._matrices:
                    torch.nn.functional.linear(self._row, matrix)
                found.append((time.perf_counter() - began) / MATRICES)
        return statistics.median(found)

    def _read_s_per_gb(self) -> float:
        drawn = [self._drawn.choice(self._experts) for _ in range(READS)]
        began = time.perf_counter()
        for one in drawn:
            self._loader.load(*one, self._into[: self._sizes[one]], lambda: False)
        return (time.perf_counter() - began) / (sum(self._sizes[one] for one in drawn) / 1e9)

    def close(self) -> None:
        self._loader.close()

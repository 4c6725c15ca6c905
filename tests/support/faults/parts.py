"""Parts of a worker that fail: its loader, and its arithmetic."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from checkpoint.expert import ExpertArithmetic

SILENCE_S = 3600.0
LOAD_FAULTS: dict[str, Callable[[], Exception]] = {
    "out of memory": lambda: MemoryError("no memory for a load"),
    "disk error": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "disk full": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
}
"""What a load raises, by the fault's name."""


class FaultyLoader:
    """As `inner`, until a `fault` is set: one of `LOAD_FAULTS`, or `damaged`, which flips a bit of what was loaded."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.fault: str | None = None
        self.slowness = 1
        """Every load takes so many times as long."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def load(
        self,
        layer: int,
        expert: int,
        into: torch.Tensor,
        cancelled: Callable[[], bool],
        form: str = "",
        digest: Any = None,
    ) -> int:
        fault = self.fault
        if fault in LOAD_FAULTS:
            raise LOAD_FAULTS[fault]()
        began = time.monotonic()
        if fault == "damaged":
            moved = int(self.inner.load(layer, expert, into, cancelled, form))
            into[moved // 2] ^= 64
            if digest is not None:
                digest.add(into[:moved].numpy(), more=False)
        else:
            moved = int(self.inner.load(layer, expert, into, cancelled, form, digest))
        time.sleep((self.slowness - 1) * (time.monotonic() - began))
        return moved


class FaultyArithmetic:
    """As `inner`, until a `fault` is set, or `slowness`: `out of memory`, `die` (the process ends), `never answer`, or
    `die at layer L`."""

    def __init__(self, inner: ExpertArithmetic) -> None:
        self.inner = inner
        self.fault: str | None = None
        self.slowness = 1
        """Every computation takes so many times as long."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def bind(self, layer: int, views: dict[str, torch.Tensor]) -> Callable[..., torch.Tensor]:
        compute = self.inner.bind(layer, views)

        def faulty(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            if self.fault in ("die", f"die at layer {layer}"):
                os._exit(1)
            if self.fault == "never answer":
                time.sleep(SILENCE_S)
            if self.fault == "out of memory":
                raise MemoryError("no memory for a computation")
            began = time.monotonic()
            output = compute(hidden, weights)
            time.sleep((self.slowness - 1) * (time.monotonic() - began))
            return output

        return faulty

"""Whether other processes used the processor while something was measured."""

from __future__ import annotations

import os
import resource
import time
from typing import Self

import psutil

BUSY = 0.1
"""Cores that others may use: a figure measured beside more is marked."""


class Others:
    """Within its `with` block: `cores` is how many cores others used meanwhile, on average; what a hypervisor took is
    theirs too. Processes that this one started and has not waited for count as others."""

    cores: float

    def __enter__(self) -> Self:
        self._began, self._all, self._own = time.perf_counter(), _all_s(), _own_s()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._began
        used = _all_s() - self._all - (_own_s() - self._own)
        self.cores = max(0.0, used / seconds)


def _all_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def _own_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = os.times()
    return own.user + own.system + children.ru_utime + children.ru_stime


def mark(cores: float | None) -> str:
    """`*` beside a figure that was measured on a busy machine."""
    return "*" if cores is not None and cores > BUSY else ""

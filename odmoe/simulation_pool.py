"""Runs simulations on all cores of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from scheduler.planning.scaling import Each

_MOST = 8
"""A plan has about twenty simulations."""


@contextlib.contextmanager
def simulation_pool() -> Iterator[Each]:
    """A `map` whose function runs in processes, one a core, that are forked now: before threads begin and before torch
    is imported. In a process that has threads already, and on a single core, the builtin `map`."""
    cores = len(os.sched_getaffinity(0))
    if cores == 1 or threading.active_count() > 1:
        yield map
        return
    pool = ProcessPoolExecutor(min(cores, _MOST), multiprocessing.get_context("fork"), _prepare)
    try:
        pool.submit(int).result()
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)  # waits, at most for the simulations that have begun


def _prepare() -> None:
    """Leave Ctrl-C to the parent, and end with it however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)

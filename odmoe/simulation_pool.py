"""Runs simulations on all cores of this machine."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

from scheduler.errors import SimulationError
from scheduler.planning.scaling import Each

_MOST = 8
"""A plan has about 50 simulations; the longest takes as long as several others."""


@contextlib.contextmanager
def simulation_pool() -> Iterator[Each]:
    """A `map` whose function runs in processes, one a core, that are forked now: before threads begin and before torch
    is imported. In a process that has threads already, on a single core, and where this machine cannot make a process
    pool (a container without /dev/shm), the builtin `map`.

    Raises SimulationError for a process that was killed.
    """
    pool = _make_pool()
    if pool is None:
        yield map
        return
    try:
        yield partial(_results, pool)
    except BrokenProcessPool as error:
        raise SimulationError(
            "a process that simulates was killed, most likely because this machine has too little free memory; end "
            "other programs, or restrict the command to one core (taskset -c 0), where it needs a single process"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)  # waits, at most for the simulations that have begun


def _results(pool: ProcessPoolExecutor, function: Callable[[Any], Any], runs: Iterable[Any]) -> Iterator[Any]:
    """As `pool.map`, but cancels nothing when it is interrupted: `shutdown` has the pool's own thread do that.

    Ctrl-C and SIGTERM reach the processes too. Where one ends of that, the pool's thread fails every simulation without
    a result, and in Python 3.11 ends with a traceback at one that `map` has cancelled meanwhile.
    """
    futures = [pool.submit(function, run) for run in runs]
    for future in futures:
        yield future.result()


def _make_pool() -> ProcessPoolExecutor | None:
    cores = len(os.sched_getaffinity(0))
    if cores == 1 or threading.active_count() > 1:
        return None
    others = multiprocessing.active_children()
    try:
        pool = ProcessPoolExecutor(min(cores, _MOST), multiprocessing.get_context("fork"), _prepare)
        pool.submit(int).result()
    except (OSError, ImportError, NotImplementedError, BrokenProcessPool):
        for child in multiprocessing.active_children():
            if child not in others:  # forked before another could not be: it would wait for work for ever
                child.kill()
                child.join()
        return None
    return pool


def _prepare() -> None:
    """Leave Ctrl-C to the parent, and end with it however it ends. Collect garbage rarely: by default that takes a
    quarter of a simulation's time, and finds little."""
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)

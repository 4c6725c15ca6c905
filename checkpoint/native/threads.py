"""Threads that restore parts of a weight at the same time, each with one thread of torch.

Torch would divide every operation on a piece among all threads and wait for the slowest, hundreds of times an expert:
where other threads want the cores, that takes many times as long as one thread alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import torch

from checkpoint.tensors import round_up

START_S = 60.0
"""Most time for all threads of a pool to start."""

_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def together(jobs: Sequence[Callable[[], None]], with_caller: bool = False) -> None:
    """Run jobs at the same time, on threads shared by all callers of this process, and wait for all of them. Raises the
    first error.

    In inference mode: the memory may be of a caller who is. `with_caller`: the first job runs on the caller's thread,
    which has more threads of torch than one. To be used for jobs that compute without torch.
    """
    pool = _pool(len(jobs))
    first = 1 if with_caller else 0
    started = [pool.submit(torch.inference_mode()(job)) for job in jobs[first:]]
    try:
        for job in jobs[:first]:
            torch.inference_mode()(job)()
    finally:
        wait(started)  # the caller may use the memory again, even after an error
    for one in started:
        one.result()


def in_shares(run: Callable[[int, int, int], None], count: int, threads: int, even: int) -> None:
    """Run `run(number, first, last)` for shares of `count` things, multiples of `even` but for the last, on at most so
    many threads. For what computes without torch: see `together`."""
    each = round_up(-(-count // threads), even)
    jobs = [partial(run, number, at, min(at + each, count)) for number, at in enumerate(range(0, count, each))]
    if len(jobs) == 1:
        jobs[0]()
    else:
        together(jobs, with_caller=True)


def start_threads(threads: int) -> None:
    """Start the threads that `together` would start for as many jobs or fewer. To be called before other threads
    compute: for a moment, threads that begin get one thread of torch."""
    if threads > 1:
        _pool(threads)


def _pool(threads: int) -> ThreadPoolExecutor:
    """The smallest pool that has so many threads; a new one only where none has."""
    with _lock:
        threads = min((size for size in _pools if size >= threads), default=threads)
        if threads not in _pools:
            _pools[threads] = _started(threads)
        return _pools[threads]


def _started(threads: int) -> ThreadPoolExecutor:
    """A pool whose threads have begun. The number of torch's threads that one of them sets also becomes that of threads
    that start later, so it is set back at once. Raises RuntimeError where the system starts no more threads."""
    before, begun = torch.get_num_threads(), threading.Barrier(threads, timeout=START_S)
    pool = ThreadPoolExecutor(threads, "odmoe-restore")

    def begin() -> None:
        begun.wait()  # one of these on each thread
        torch.get_num_threads()  # a thread's first call takes the process's number, and would undo what was set before
        torch.set_num_threads(1)

    try:
        for started in [pool.submit(begin) for _ in range(threads)]:
            started.result()
    except BaseException:
        begun.abort()  # those that have started wait for the others
        pool.shutdown()
        raise
    finally:
        torch.set_num_threads(before)
    return pool

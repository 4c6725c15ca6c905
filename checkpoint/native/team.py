"""One hand-over to torch's own threads.

Torch's threads wait in a loop for their next operation. Other threads would have to take the cores from them, which
makes a second thread slower than none. So compiled tasks run on torch's, of the calling thread: GNU's OpenMP, which
torch's wheels bring along, starts them by one function.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from checkpoint.native.threads import together

Start = Callable[[int, int, int, int], None]

LEAST_BYTES = 1 << 19
"""A task that reads fewer is done by one thread as soon as a hand-over to torch's."""
OTHER_THREAD_BYTES = 1 << 25
"""The same, for each thread, if the threads are others: these wake up late, and take the cores from torch's."""


def team_size(nbytes: int) -> int:
    """How many threads a task that reads so many bytes runs on.

    All of torch's or one: GNU's OpenMP ends threads when a team is smaller than the one before, and starts them anew
    for the next.
    """
    threads = torch.get_num_threads()
    if _torch_start() is None:
        return max(min(threads, nbytes // OTHER_THREAD_BYTES), 1)
    return threads if nbytes >= LEAST_BYTES else 1


class Task:
    """A task, compiled by `numba.cfunc` from void(voidptr). It must divide its work by itself."""

    def __init__(self, task: Any) -> None:
        self._compiled = task
        self._address = task.address
        self._call = task.ctypes

    def run(self, data: int, threads: int) -> None:
        """Call it with the address of its data on so many threads at once, of which the caller is one. Python's lock is
        not held meanwhile."""
        if threads == 1:
            self._call(data)
        elif (start := _torch_start()) is not None:
            start(self._address, data, threads, 0)
        else:
            together([partial(self._call, data)] * threads, with_caller=True)


@cache
def _torch_start() -> Start | None:
    """GOMP_parallel of the library that torch has loaded. None for a torch with other threads."""
    package = Path(torch.__file__).parent
    for path in (*package.glob("lib/libgomp*.so*"), *package.parent.glob("torch.libs/libgomp*.so*")):
        with contextlib.suppress(OSError):  # it is not loaded
            start = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_NOLOAD).GOMP_parallel
            start.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            start.restype = None
            found: Start = start
            return found
    return None

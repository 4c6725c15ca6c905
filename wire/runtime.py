"""Time and threads of the nodes, in one place: the standard library's own, or those of a simulated world.

The packages of the nodes take clocks, waits, threads, locks and queues from this module, by `runtime.NAME`, and from
nowhere else (`tests/test_runtime.py`). As they stand here these names are the standard library's objects: nothing is
called in between. `install` puts others in their places, for all that is made afterwards in this process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from threading import Condition, Event, Lock, RLock, Thread, Timer, current_thread
from time import monotonic, monotonic_ns, perf_counter, sleep
from typing import Any

__all__ = [
    "Condition",
    "Empty",
    "Event",
    "Future",
    "Lock",
    "RLock",
    "SimpleQueue",
    "Thread",
    "ThreadPoolExecutor",
    "Timer",
    "current_thread",
    "install",
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "sleep",
]

NAMES = frozenset(__all__) - {"install", "Empty", "Future"}
"""What a simulated world has to offer."""


@contextlib.contextmanager
def install(world: Any) -> Iterator[None]:
    """Within the `with` block, `world`'s attributes of these `NAMES` are what the nodes get. Not for two at a time."""
    real = {name: globals()[name] for name in NAMES}
    globals().update({name: getattr(world, name) for name in NAMES})
    try:
        yield
    finally:
        globals().update(real)

"""The listening socket: how many connections are accepted at a time, and what happens when no file is left for one."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

AT_ONCE = 64
"""Connections that are accepted before anything else has its turn on the event loop."""
REST_S = 0.9
"""Shortest time between two errors of the kernel that reach asyncio, which then waits a second."""
FILES = 65_536
"""Open files that are asked for, if the hard limit allows them."""
SPARE_FILES = 128
"""Left for what is not a connection."""
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ListeningSocket(socket.socket):
    """Takes the place of another one, which is closed. asyncio accepts as many connections at a time as may wait for
    it, and if no file is left, it reports each of these."""

    def __init__(self, bound: socket.socket, on_exhausted: Callable[[], None]) -> None:
        """`on_exhausted`: no file is left."""
        super().__init__(bound.family, bound.type, bound.proto, fileno=os.dup(bound.fileno()))
        bound.close()
        self._on_exhausted = on_exhausted
        self._accepted, self._rests_until = 0, 0.0

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises BlockingIOError if none waits, or others have to have a turn."""
        self._accepted += 1
        if self._accepted > AT_ONCE or time.monotonic() < self._rests_until:
            self._accepted = 0
            raise BlockingIOError
        try:
            return super().accept()
        except BlockingIOError:
            self._accepted = 0
            raise
        except OSError as error:
            if error.errno in EXHAUSTED:
                self._rests_until = time.monotonic() + REST_S
                self._on_exhausted()
            raise


def ignore_exhaustion(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A handler of the loop's errors: that no file is left was told already."""
    error = context.get("exception")
    if not (isinstance(error, OSError) and error.errno in EXHAUSTED and "socket" in context):
        loop.default_exception_handler(context)


def raise_file_limit() -> int:
    """Raise this process's limit of open files as far as it may. Returns how many connections that leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY:
        soft = FILES
    return max(1, soft - len(os.listdir("/proc/self/fd")) - SPARE_FILES)

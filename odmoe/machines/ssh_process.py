"""A command on another machine whose streams are pipes here."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import IO

from scheduler.errors import HostError, LinkError

LEASH = """
import os, signal, subprocess, sys, threading
child = subprocess.Popen(["sh", "-c", sys.argv[2]], stdin=subprocess.PIPE, start_new_session=True)
def end(number):
    try: os.killpg(child.pid, number)
    except OSError: pass
def feed():
    data = os.read(0, 65536)
    while data:
        try:
            child.stdin.write(data)
            child.stdin.flush()
        except OSError: pass
        data = os.read(0, 65536)
    try: child.stdin.close()
    except OSError: pass
    for number in (signal.SIGTERM, signal.SIGKILL):
        try: return child.wait(float(sys.argv[1]))
        except subprocess.TimeoutExpired: end(number)
threading.Thread(target=feed, daemon=True).start()
code = child.wait()
sys.stdout.flush()
os._exit(code if code >= 0 else 128 - code)
"""
"""Runs on the host, between ssh and the command, and ends the command when standard input ends: without a terminal,
sshd does not end a command whose connection has gone."""


class Remote:
    """`stdin`, `stdout` and `stderr` are binary, unbuffered by us. Use `lines`, or read the streams yourself."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        failed: Callable[[int, str], HostError],
        forget: Callable[[subprocess.Popen[bytes]], None],
    ) -> None:
        self.process = process
        self._failed, self._forget = failed, forget
        self._tail: deque[str] = deque(maxlen=40)
        self._threads: list[threading.Thread] = []

    @property
    def stdin(self) -> IO[bytes]:
        return _pipe(self.process.stdin)

    @property
    def stdout(self) -> IO[bytes]:
        return _pipe(self.process.stdout)

    @property
    def stderr(self) -> IO[bytes]:
        return _pipe(self.process.stderr)

    def failure(self, code: int, stderr: str) -> HostError:
        """The error of a nonzero exit code and standard error."""
        return self._failed(code, stderr)

    def send(self, text: str) -> None:
        """Write to standard input. If the command has ended, reading its output raises the error."""
        data = text.encode()
        with contextlib.suppress(OSError, ValueError):  # ValueError: another thread has called `close`
            self.stdin.write(data)
            self.stdin.flush()

    def lines(self, idle_s: float, until: float) -> Iterator[str]:
        """Lines of standard output as they arrive. `until` is on the monotonic clock.

        Raises LinkError after `idle_s` of silence or at `until`, HostError for a nonzero exit code.
        """
        found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._follow(self.stderr, lambda line: self._tail.append(line or ""))
        self._follow(self.stdout, found.put)
        while True:
            wait_s = min(idle_s, until - time.monotonic())
            try:
                line = found.get(timeout=max(0.0, wait_s))
            except queue.Empty:
                raise LinkError(f"nothing was heard for {max(0.0, wait_s):.0f} s") from None
            if line is None:
                break
            yield line
        self.end()

    def end(self, deadline_s: float = 10.0) -> None:
        """Wait for the command to end. Raises HostError for a nonzero exit code."""
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.close()
            return
        for thread in self._threads:
            thread.join(1.0)
        self._forget(self.process)
        if code != 0:
            raise self._failed(code, "\n".join(self._tail))

    def close(self, deadline_s: float = 12.0) -> None:
        """Close standard input, which ends the command, then kill what is left here."""
        with contextlib.suppress(OSError):
            self.stdin.close()
        try:
            self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
        self._forget(self.process)

    def _follow(self, stream: IO[bytes], tell: Callable[[str | None], object]) -> None:
        def follow() -> None:
            with contextlib.suppress(OSError, ValueError):
                for line in stream:
                    tell(line.decode(errors="replace").rstrip("\n"))
            tell(None)

        self._threads.append(threading.Thread(target=follow, daemon=True))
        self._threads[-1].start()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise ValueError("the process was started without this pipe")
    return stream

"""Commands in processes of their own, and all that they start: found by a mark in their environment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ODMOE = Path(sys.executable).with_name("odmoe")
MARK = "TEST_MARK_OF_ODMOE"
"""The environment variable that whatever a marked process starts has too."""
WITH_CTRL_C = ("env", "--default-signal=INT")
"""Before a command: a shell that runs the tests in its background has them ignore Ctrl-C, and their children with
them. Popen's preexec_fn would fork a process in which gRPC runs: one such child in twenty aborts."""
HANG_S = 120.0
"""No step of these tests takes this long, on whatever machine: who waits longer hangs."""


def marked(mark: str) -> list[str]:
    """Numbers and command lines of the processes that carry `mark`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{folder.name} {line}")
    return found


def wait_until(true: Callable[[], object], what: str = "", deadline_s: float = HANG_S) -> None:
    """Raises AssertionError where it does not become true."""
    end = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what or true}"
        time.sleep(0.02)


def wait_until_gone(mark: str, deadline_s: float = HANG_S) -> None:
    """Until no process carries `mark`. Raises AssertionError, which names those that are left."""
    end = time.monotonic() + deadline_s
    while left := marked(mark):
        assert time.monotonic() < end, "\n".join(left)
        time.sleep(0.05)


class Running:
    """A command in a process and a session of its own, as a shell starts it."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str) -> None:
        self.process = process
        self.mark = mark

    def first_byte(self) -> bytes:
        """Of standard output, waited for; empty at its end."""
        assert self.process.stdout is not None
        return os.read(self.process.stdout.fileno(), 1)

    def finish(self) -> tuple[int, bytes, bytes]:
        """Exit code, and what is left on standard output and standard error."""
        out, err = self.process.communicate(timeout=HANG_S)
        return self.process.returncode, out, err

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """Ctrl-C, as a terminal sends it: to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def wait_until_caught(self) -> None:
        """Until the command itself handles SIGTERM: before, Python starts."""
        status = Path(f"/proc/{self.process.pid}/status")

        def caught() -> bool:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            return bool(int(fields["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1)

        wait_until(caught, "SIGTERM is handled")

    def check_interrupted(self, number: signal.Signals = signal.SIGINT) -> None:
        """It ends, says no more than that it was interrupted, after what it chose and the progress of a long start, and
        leaves no process."""
        code, _, err = self.finish()
        said = [line for line in err.splitlines(keepends=True) if not line.endswith(b"s so far)\n")]
        err = b"".join(line for line in said if not line.startswith(b"chose "))
        word = {signal.SIGINT: b"interrupted\n", signal.SIGTERM: b"terminated\n"}[number]
        assert (code, err) == (128 + number, word), (code, err.decode(errors="replace"))
        wait_until_gone(self.mark)


class Starter:
    """`start("generate", ...)`: the command line as a person starts it; what still runs is killed at the end."""

    def __init__(self) -> None:
        self._running: list[Running] = []

    def __call__(self, *args: str, stdin: Any = subprocess.DEVNULL, **environment: str) -> Running:
        mark = uuid.uuid4().hex
        process = subprocess.Popen(
            [*WITH_CTRL_C, ODMOE, *args],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {MARK: mark} | environment,
        )
        self._running.append(Running(process, mark))
        return self._running[-1]

    def close(self) -> None:
        for running in self._running:
            running.process.kill()
            running.process.communicate()


@contextlib.contextmanager
def starter() -> Iterator[Starter]:
    made = Starter()
    try:
        yield made
    finally:
        made.close()

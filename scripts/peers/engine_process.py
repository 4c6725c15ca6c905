"""An engine in a process of its own, and that process as seen by the script.

The process is started once and asked in turns. It is put into its memory group before it imports any library.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from scripts.lib.paths import ROOT
from scripts.peers.engines import Engine, Task, Turn
from scripts.peers.groups import Group

ANSWER_S = 900.0
"""Longest wait for an engine to load and answer."""
END_S = 30.0
"""Longest wait for a process to end by itself."""


class EngineFailed(Exception):
    """An engine's process failed or was killed. The message says why."""


class EngineProcess:
    """Starts the process. `group`: the memory group to put it into; closed with the process."""

    def __init__(self, engine: Engine, group: Group | None = None) -> None:
        self.engine = engine
        self.group = group
        self.start_s: float | None = None
        """From the start of the process to its first token."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        ours, theirs = socket.socketpair()
        self._started = time.monotonic()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scripts.peers.engine_process", str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
        self._pipe = Connection(ours.detach())
        if group is not None:
            group.add(self._process.pid)
        self._send(engine)

    @property
    def pid(self) -> int:
        return self._process.pid

    def answer(self, task: Task) -> Turn:
        """Raises EngineFailed."""
        self._send(task)
        try:
            if not self._pipe.poll(ANSWER_S):
                self._process.kill()
                raise self._failure(f"did not answer within {ANSWER_S:.0f} s and was killed")
            found: Turn = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise self._failure("ended") from None
        if self.start_s is None:
            self.start_s = found.first_token_at - self._started
        return found

    def peak_bytes(self) -> int:
        """The most resident memory so far, pages of mapped files included."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise EngineFailed(f"{self.engine.kind} has ended")

    def _send(self, what: Any) -> None:
        try:
            self._pipe.send(what)
        except (BrokenPipeError, ConnectionError):
            raise self._failure("ended") from None

    def _failure(self, what: str) -> EngineFailed:
        """Ends the process."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(END_S)
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()
        self.close()
        if code == -9 and what == "ended" and self.group is not None:
            return EngineFailed(f"{self.engine.kind} needs more than its cap of {self.group.limit / 1e9:.2f} GB")
        return EngineFailed(f"{self.engine.kind} {what} ({code}): {said[-1] if said else 'no message'}")

    def close(self) -> None:
        """End the process and remove its group."""
        self._pipe.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        if self.group is not None:
            self.group.close()


def serve(file: int) -> None:
    """The process: makes the engine that it is sent, then answers tasks until the pipe is closed."""
    pipe = Connection(file)
    engine: Engine = pipe.recv()  # before any library is imported
    from scripts.lib.timing.idleness import Others
    from scripts.peers.engines import make_engine

    made = make_engine(engine)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            task = pipe.recv()
            with Others() as others:
                turn = made.answer(task)
            pipe.send(replace(turn, others_cores=others.cores))
    made.close()
    os._exit(0)  # threads of a library that are left do not hold it up


if __name__ == "__main__":
    serve(int(sys.argv[1]))

"""Interrupted: many prompts whose answers wait for a token that does not come; an import."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from main_node.answer import Step
from odmoe.commands.generate import Job, _in_order
from odmoe.settings.settings import Settings
from scheduler.errors import RequestCancelledError
from support.paths import ROOT

WAIT_S = 20.0


class Waiting(Iterator[Step]):
    """An answer that comes to an end only when it is cancelled."""

    def __init__(self) -> None:
        self.asked, self.cancelled = threading.Event(), threading.Event()

    def __next__(self) -> Step:
        self.asked.set()
        if self.cancelled.wait(WAIT_S):
            raise RequestCancelledError("request 1 was cancelled")
        raise TimeoutError("nobody cancelled it")

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        pass


class Cluster:
    def __init__(self) -> None:
        self.answers: list[Waiting] = []

    def generate(self, prompt: list[int], **how: Any) -> Waiting:
        self.answers.append(Waiting())
        return self.answers[-1]


def test_answers_under_way_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third waits for a thread, and is never begun."""
    cluster = Cluster()
    job = Job(Settings(model="m"), Settings(model="m"), None, cluster, "float32")  # type: ignore[arg-type]

    def interrupt(future: Any) -> None:
        until = time.monotonic() + WAIT_S
        while len(job.under_way) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert all(one.asked.wait(WAIT_S) for one in cluster.answers)
        raise KeyboardInterrupt

    monkeypatch.setattr(futures.Future, "result", interrupt)
    with futures.ThreadPoolExecutor(2) as pool, pytest.raises(KeyboardInterrupt):
        next(_in_order(job, [[1], [2], [3]], pool))
    assert [one.cancelled.is_set() for one in cluster.answers] == [True, True]
    assert job.under_way == set()


SWALLOWS = """
import time
print("importing", flush=True)
try:
    time.sleep(1.5)
except BaseException:
    print("swallowed", flush=True)
"""


def test_an_import_that_would_swallow_it_is_waited_for(tmp_path: Path) -> None:
    """As torch's does."""
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    code = "import odmoe.cli.main, time; odmoe.cli.main.one_interrupt(); import swallows; time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(tmp_path)}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=50)
    finally:
        process.kill()
    assert out == ""
    assert err.splitlines()[-1] == "KeyboardInterrupt"

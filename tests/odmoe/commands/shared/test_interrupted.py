"""Interrupted: many prompts whose answers wait for a token that does not come; an import."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from main_node.answer import Step
from odmoe.settings.settings import Settings
from scheduler.errors import RequestCancelledError
from support.machines.cli import CommandLine
from support.machines.processes import HANG_S, WITH_CTRL_C, wait_until
from support.paths import ROOT


class Waiting(Iterator[Step]):
    """An answer that comes to an end only when it is cancelled."""

    def __init__(self) -> None:
        self.asked, self.cancelled, self.closed = threading.Event(), threading.Event(), threading.Event()

    def __next__(self) -> Step:
        self.asked.set()
        if self.cancelled.wait(HANG_S):
            raise RequestCancelledError("request 1 was cancelled")
        raise TimeoutError("nobody cancelled it")

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        self.closed.set()


class Cluster:
    """Its answers never come."""

    def __init__(self, settings: Settings, *given: Any) -> None:
        self.settings = settings
        self.answers: list[Waiting] = []
        self.closed = False

    def generate(self, prompt: list[int], **how: Any) -> Waiting:
        self.answers.append(Waiting())
        return self.answers[-1]

    def serves(self) -> Settings:
        return self.settings

    def changes(self, since: int | None) -> tuple[int, list[str]]:
        return 0, []

    def close(self) -> None:
        self.closed = True


def test_answers_under_way_are_cancelled(
    cli: CommandLine, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third waits for a thread, and is never begun."""
    made: list[Cluster] = []

    def start(*given: Any) -> Cluster:
        made.append(Cluster(*given))
        monkeypatch.setattr(futures.Future, "result", interrupt)
        return made[-1]

    def interrupt(future: Any) -> None:
        (cluster,) = made
        wait_until(lambda: len(cluster.answers) == 2, "two answers have begun")
        assert all(one.asked.wait(HANG_S) for one in cluster.answers)
        raise KeyboardInterrupt

    monkeypatch.setattr("odmoe.api.model.start_cluster", start)
    prompts = tmp_path / "prompts"
    prompts.write_text("one\ntwo\nthree\n")
    answer = cli("generate", "-m", str(demo), "--system", "od-moe", "--prompts", str(prompts), "--parallel", "2")
    assert (answer.code, answer.out, answer.err) == (130, "", "interrupted\n")
    (cluster,) = made
    assert cluster.closed
    assert [(one.cancelled.is_set(), one.closed.is_set()) for one in cluster.answers] == [(True, True)] * 2


FOR_EVER = "while True: time.sleep(0.05)"
"""Python notices a signal that comes just before a sleep only after it."""
SWALLOWS = """
import time
print("importing", flush=True)
try:
    time.sleep(1.5)
except BaseException:
    print("swallowed", flush=True)
"""


FINALISES = """
class Slow:
    def __del__(self):
        print("finalising", flush=True)
        time.sleep(1.5)

Slow()
"""


def interrupted(arguments: list[str], modules: Path, begun: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a Python that gets Ctrl-C once it has said `begun`. `modules`: its imports."""
    process = subprocess.Popen(
        [*WITH_CTRL_C, sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(modules)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == begun
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANG_S)
        return process.returncode, out, err
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("work", "begun"), [("import swallows", "importing\n"), (FINALISES, "finalising\n")])
def test_an_import_or_a_finaliser_that_would_swallow_it_is_waited_for(work: str, begun: str, tmp_path: Path) -> None:
    """torch's import catches it, and Python discards what a finaliser raises."""
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    code = f"import odmoe.command_line, time\nodmoe.command_line.one_interrupt()\n{work}\n{FOR_EVER}"
    _, out, err = interrupted(["-c", code], tmp_path, begun)
    assert out == ""
    assert err.splitlines()[-1] == "KeyboardInterrupt"


def test_ctrl_c_while_the_command_line_is_imported_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(f'import time\nprint("importing", flush=True)\n{FOR_EVER}\n')
    assert interrupted(["-m", "odmoe", "--help"], tmp_path, "importing\n") == (130, "", "interrupted\n")


HALF_ENTERED = """
import os, signal, time
import odmoe.commands.shared.exit as ends
from scheduler.errors import CheckpointError

def build():
    try:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            raise RuntimeError("trying to pop from empty mode stack")
    except Exception as error:
        raise CheckpointError("config.json describes no model that can be built") from error

ends.one_interrupt()
raise SystemExit(ends.outcome(build))
"""


def test_an_error_that_an_interrupt_has_caused_is_the_interrupt() -> None:
    """As torch raises it, if its context was left half entered while a model was built."""
    process = subprocess.run(
        [*WITH_CTRL_C, sys.executable, "-c", HALF_ENTERED], capture_output=True, text=True, cwd=ROOT
    )
    assert (process.returncode, process.stderr) == (143, "terminated\n")

"""The main node of a cluster that lasts is killed in the middle of answers, once and again: with `--retry` the same
text comes out, without it a named error.

Takes about 60 s on two idle cores: one start of Ray.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from support.machines.processes import MARK, marked
from support.paths import ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PROMPT = "Question: Tom has 3 apples and buys 5 more. How many does he have?"
COUNT = 120
HANG_S = 240.0
DEATH_S = 2.0


@pytest.fixture(scope="module")
def ask(head: str, environment: dict[str, str], demo_store: Callable[[str], Any]) -> Callable[..., Any]:
    """`ask(flags, kills)`: the exit code, the answer, standard error, and the seconds from the last kill to the end.

    `kills`: after how many characters of the answer the main node is killed, in ascending order."""
    nodes = ["-m", str(demo_store("float32").path), "--shadow", "none", "--threads", "1", "--launch-timeout", "120"]

    def run(flags: list[str], kills: list[int]) -> tuple[int, str, str, float]:
        command = [sys.executable, "-m", "odmoe", "generate", *nodes, "--cluster", head, *flags, PROMPT]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        out, killed = b"", float("nan")
        try:
            for at in kills:
                while len(out) < at:
                    out += os.read(process.stdout.fileno(), 1)
                pid = main_node(environment[MARK])
                killed = time.monotonic()
                os.kill(pid, signal.SIGKILL)
            rest, err = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
        return process.returncode, (out + rest).decode(), err.decode(), time.monotonic() - killed

    return run


def main_node(mark: str) -> int:
    """The process id of the main node's actor."""
    (pid,) = [int(line.split()[0]) for line in marked(mark) if "ray::Main" in line]
    return pid


def test_the_answer_goes_on(ask: Callable[..., Any]) -> None:
    flags = ["-n", str(COUNT), "--ignore-eos"]
    code, whole, err, _ = ask(flags, [])
    assert code == 0, err
    code, out, err, _ = ask([*flags, "--retry", "3", "-q"], [5])
    assert (code, out) == (0, whole), err
    code, out, err, _ = ask([*flags, "--retry", "3"], [40, 100])
    assert (code, out) == (0, whole), err
    lines = [line for line in err.splitlines() if line.startswith("main node lost after ")]
    assert [line.partition("; ")[2] for line in lines] == ["retry 1 of 3", "retry 2 of 3"]


def test_a_drawn_answer_goes_on(ask: Callable[..., Any]) -> None:
    """Nothing of it is known beforehand: were the tokens others, the command would end with AnswerChangedError."""
    flags = ["-n", str(COUNT), "--ignore-eos", "--temperature", "0.9", "--retry", "2"]
    code, out, err, _ = ask(flags, [40])
    assert code == 0, err
    assert len(out) > 40


def test_without_retry_it_is_an_error_in_time(ask: Callable[..., Any]) -> None:
    code, _, err, after_s = ask(["-n", "800", "--ignore-eos"], [40])
    assert code == 1
    assert err.splitlines()[-1].startswith("odmoe: MainNodeLostError: the main node ")
    # The command's own end takes another second or two on busy cores: it disconnects from Ray.
    assert after_s < DEATH_S + 20

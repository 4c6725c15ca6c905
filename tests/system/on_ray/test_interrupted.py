"""Ctrl-C while a local cluster starts or answers: no process of Ray is left."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from support.machines.processes import marked, starter, wait_until, wait_until_gone

pytestmark = pytest.mark.system

PROMPT = "Question: Tom has 3 apples and buys 5 more. How many does he have?\nAnswer:"


@pytest.mark.parametrize("when", ["starting", "answering"])
def test_an_interrupted_local_cluster_leaves_no_process(when: str, demo: Path) -> None:
    """Though Ctrl-C is pressed twice."""
    command = ("generate", "-m", str(demo), "-n", "900", "--cluster", "local", "--workers", "1", "--shadow", "none")
    with starter() as start:
        running = start(*command, PROMPT)
        if when == "answering":
            assert running.first_byte()
        else:
            wait_until(lambda: any("raylet" in line for line in marked(running.mark)), "Ray starts")
        running.interrupt()
        time.sleep(0.25)
        running.interrupt()
        running.check_interrupted()


def test_a_run_of_chaos_that_is_terminated_has_a_verdict(demo: Path) -> None:
    """Ray, which starts in the main thread, has a handler of SIGTERM of its own."""
    command = ("chaos", "-m", str(demo), "--workers", "1", "--threads", "1", "--shadow", "none", "-n", "8", "--yes")
    with starter() as start:
        running = start(*command, "--for", "300s", "--faults", "none", "--json")
        assert running.process.stderr is not None
        for line in running.process.stderr:
            if re.search(rb" \d\d+ answers, ", line):
                break
        running.process.terminate()
        code, out, err = running.finish()
        assert (code, err.splitlines()[-1]) == (128 + signal.SIGTERM, b"terminated"), err.decode()
        verdict = json.loads(out)
        assert verdict["requests"] > 0
        assert verdict["violations"] == []
        assert " answers, " in verdict["interrupted"]
        wait_until_gone(running.mark)

"""Ctrl-C while a local cluster starts or answers: no process of Ray is left."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from support.machines.processes import marked, starter, wait_until

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

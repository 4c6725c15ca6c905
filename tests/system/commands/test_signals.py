"""Ctrl-C and SIGTERM at random moments of commands: the exit code and the one line are ours, and nothing is
left."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from support.machines.processes import Starter

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

PROMPT = "Question: Tom has 3 apples and buys 5 more. How many does he have?\nAnswer:"


def commands(demo: Path, folder: Path) -> dict[str, list[str]]:
    mixtral = "tests/data/configs/mixtral-8x7b.json"
    return {
        "generate": ["generate", "-m", str(demo), "-n", "900", "--ignore-eos", PROMPT],
        "shard": ["shard", str(demo), str(folder / "store"), "--forms", "int4,int2", "--verify"],
        "simulate": ["simulate", "--tokens", "4000"],
        "plan": ["plan", "-m", mixtral, "--workers", "64"],
    }


@pytest.mark.parametrize(("name", "moments"), [("generate", 3), ("shard", 3), ("simulate", 2), ("plan", 2)])
def test_a_signal_at_any_moment(name: str, moments: int, start: Starter, demo: Path, tmp_path: Path) -> None:
    """Each signal in its turn."""
    rng, command = random.Random(name), commands(demo, tmp_path)[name]
    began = time.monotonic()
    if name == "shard":
        assert start(*command).finish()[0] == 0
    most_s = time.monotonic() - began if name == "shard" else 8.0
    for moment in range(moments):
        number = (signal.SIGINT, signal.SIGTERM)[moment % 2]
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        running = start(*command)
        running.wait_until_caught()
        time.sleep(rng.uniform(0.0, most_s))
        running.interrupt(number)
        if running.process.wait(120) == 0:  # it had ended, or was about to
            continue
        running.check_interrupted(number)
    if name == "shard":  # what was left is taken up, or made anew
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        assert start(*command).finish()[0] == 0
        assert [entry.name for entry in tmp_path.iterdir()] == ["store"]

"""The command line in processes of its own: as the answer streams, and interrupted as it starts.

With Ray: tests/system/on_ray/test_interrupted.py. Takes about 60 s on two idle cores.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from support.machines.processes import Starter, wait_until

pytestmark = pytest.mark.system

PROMPT = "Question: Tom has 3 apples and buys 5 more. How many does he have?\nAnswer:"


def test_the_answer_streams(start: Starter, demo: Path) -> None:
    """Over a pipe, in many pieces, the first while there is more to come."""
    running = start(
        "generate", "-m", str(demo), "-n", "60", "--ignore-eos", "--shadow", "nf4", "--threads", "1", PROMPT
    )
    assert running.process.stdout is not None
    pieces = []
    while piece := os.read(running.process.stdout.fileno(), 65536):
        pieces.append(piece)
        if len(pieces) == 1:
            assert running.process.poll() is None
    code, _, err = running.finish()
    assert code == 0
    assert len(pieces) > 60 / 3
    assert b"\x1b" not in err
    assert b"Warning" not in err


@pytest.mark.parametrize("after", [0.8, 2.4])
def test_interrupted_while_it_starts(after: float, start: Starter, demo: Path) -> None:
    """`after` seconds from the moment that it loads torch."""
    running = start("generate", "-m", str(demo), "-n", "900", PROMPT)
    maps = Path(f"/proc/{running.process.pid}/maps")
    wait_until(lambda: "libtorch" in maps.read_text(), "torch is being loaded")
    time.sleep(after)
    running.interrupt()
    running.check_interrupted()

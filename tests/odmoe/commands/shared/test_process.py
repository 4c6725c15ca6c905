"""The command line in a process of its own: what only a process can show. More of these: tests/system/commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.machines.processes import Starter, wait_until

pytestmark = pytest.mark.slow
PROMPT = "Question: Tom has 3 apples and buys 5 more. How many does he have?\nAnswer:"


def test_a_reader_that_goes_away(start: Starter, demo: Path) -> None:
    """As `odmoe generate ... | head -c1`: had the text come in one piece at the end, it would end well."""
    running = start("generate", "-m", str(demo), "-n", "900", "--shadow", "none", "--workers", "2", PROMPT)
    assert running.first_byte()
    assert running.process.stdout is not None
    running.process.stdout.close()
    assert running.process.stderr is not None
    assert running.process.stderr.read() == b""
    assert running.process.wait() == 1


def test_interrupted_while_it_answers(start: Starter, demo: Path) -> None:
    running = start("generate", "-m", str(demo), "-n", "900", "--shadow", "nf4", PROMPT)
    assert running.first_byte()
    running.interrupt()
    running.check_interrupted()


def test_interrupted_while_it_loads_torch(start: Starter, demo: Path) -> None:
    running = start("generate", "-m", str(demo), "-n", "900", PROMPT)
    maps = Path(f"/proc/{running.process.pid}/maps")
    wait_until(lambda: "libtorch" in maps.read_text(), "torch is being loaded")
    running.interrupt()
    running.check_interrupted()

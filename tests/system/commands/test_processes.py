"""The command line in processes of its own: interrupted at any moment; a full disk, a full output.

With Ray: tests/system/on_ray/test_interrupted.py. Takes about 60 s on two idle cores.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from support.machines.processes import HANG_S, ODMOE, Starter, wait_until

pytestmark = pytest.mark.system

PROMPT = "Question: Tom has 3 apples and buys 5 more. How many does he have?\nAnswer:"


def without_progress(err: bytes) -> bytes:
    """Less the lines about what takes long, as on a busy machine."""
    return re.sub(rb"(?m)^.* \(\d+ s so far\)\n", b"", err)


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


def test_interrupted_while_it_answers_without_a_shadow(start: Starter, demo: Path) -> None:
    running = start("generate", "-m", str(demo), "-n", "900", "--shadow", "none", PROMPT)
    assert running.first_byte()
    running.interrupt()
    running.check_interrupted()


@pytest.mark.parametrize("after", [0.8, 2.4])
def test_interrupted_while_it_starts(after: float, start: Starter, demo: Path) -> None:
    """`after` seconds from the moment that it loads torch."""
    running = start("generate", "-m", str(demo), "-n", "900", PROMPT)
    maps = Path(f"/proc/{running.process.pid}/maps")
    wait_until(lambda: "libtorch" in maps.read_text(), "torch is being loaded")
    time.sleep(after)
    running.interrupt()
    running.check_interrupted()


def test_a_full_disk(demo: Path, tmp_path: Path) -> None:
    """Files may not grow past a megabyte: the store is not left half-written."""
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 1024 && exec "$0" "$@"', ODMOE, "shard", demo, tmp_path / "here" / "store"],
        capture_output=True,
        check=False,
        timeout=HANG_S,
    )
    err = without_progress(done.stderr)
    assert (done.returncode, done.stdout, err.count(b"\n")) == (1, b"", 1), err
    assert err.startswith(b"odmoe: StoreWriteError: ")
    assert list((tmp_path / "here").iterdir()) == []


def test_standard_output_that_is_full(demo: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [ODMOE, "generate", "-m", demo, "--system", "od-moe", "-n", "20", PROMPT],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=HANG_S,
            check=False,
        )
    assert done.returncode == 1
    assert without_progress(done.stderr).count(b"\n") == 1, done.stderr
    assert b"No space left" in done.stderr


def test_debug_shows_where_it_came_from(start: Starter) -> None:
    code, out, err = start("generate", "--debug", "-m", "nowhere", "hello").finish()
    assert (code, out) == (1, b"")
    assert b"Traceback" in err
    assert err.splitlines()[-1].startswith(b"odmoe: CheckpointError: ")


def test_no_ray_runs_here(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error has one line, ours, within seconds: most of them are Ray's import."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    began = time.monotonic()
    code, out, err = start("generate", "--cluster", "auto", "hello").finish()
    err = without_progress(err)
    assert (code, out, err.count(b"\n")) == (1, b"", 1), err
    assert re.match(rb"odmoe: LaunchError: no Ray answers at [\d.]+:1, which RAY_ADDRESS names", err), err
    assert time.monotonic() - began < 30  # Ray itself takes 80


def test_nothing_answers_at_the_address(start: Starter, demo: Path) -> None:
    """Ray itself would try for minutes."""
    code, out, err = start("generate", "-m", str(demo), "--cluster", "127.0.0.1:1", "hello").finish()
    err = without_progress(err)
    assert (code, out, err.count(b"\n")) == (1, b"", 1)
    assert err.startswith(b"odmoe: LaunchError: no Ray cluster answers at 127.0.0.1:1 within")

"""Cells of an experiment are computed once, whatever happens to the process that computes them."""

from __future__ import annotations

import csv
import fcntl
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.lib import ledger
from support.paths import ROOT
from tests.scripts.lib.squares import squares

Run = Callable[..., tuple[list[int], str]]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def run(out: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(*flags, code=0)`: what was computed in this run, and what was said on standard error."""

    def call(*flags: str, code: int = 0) -> tuple[list[int], str]:
        (out / "calls").unlink(missing_ok=True)
        argv = ["--out", str(out), *flags]
        monkeypatch.setattr(sys, "argv", ["squares.py", *argv])
        capfd.readouterr()
        ended: object = 0
        try:
            squares(argv)
        except SystemExit as exit:
            ended = exit.code
        said = capfd.readouterr().err
        if isinstance(ended, str):  # as Python does with it
            ended, said = 1, said + ended
        assert ended == code, said
        return calls(out), said

    return call


def start(out: Path, *flags: str) -> subprocess.Popen[str]:
    """The same in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.scripts.lib.squares", "--out", str(out), *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def killed(out: Path, at: int) -> None:
    process = start(out, "--killed-at", str(at))
    _, said = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, said


def calls(out: Path) -> list[int]:
    file = out / "calls"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def lines(out: Path) -> list[str]:
    return (out / "squares.cells.jsonl").read_text().splitlines(keepends=True)


def of_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every package is of this code."""
    monkeypatch.setattr(ledger, "package_digest", lambda package: name + package)


def test_killed_within_a_cell_goes_on_with_that_cell_and_runs_nothing_twice(out: Path, run: Run) -> None:
    killed(out, at=2)
    assert calls(out) == [0, 1, 2]
    assert not (out / "squares.json").exists()
    assert run()[0] == [2, 3]
    computed, said = run()
    assert computed == []
    assert "4 of 4 cells were finished before" in said


@pytest.mark.parametrize("left", [1, 20, -1])
def test_killed_in_the_middle_of_a_write_only_that_cell_is_computed_again(out: Path, run: Run, left: int) -> None:
    """`left`: characters of the last line that had reached the disk."""
    run()
    *whole, last = lines(out)
    (out / "squares.cells.jsonl").write_text("".join(whole) + last[:left])
    assert run()[0] == [3]
    assert [json.loads(line)["result"]["square"] for line in lines(out)] == [0, 1, 4, 9]
    assert run()[0] == []


def test_a_line_that_cannot_be_read_is_named_and_its_cell_computed_again(out: Path, run: Run) -> None:
    run()
    broken = lines(out)
    broken[1] = broken[1][:30] + "\n"
    (out / "squares.cells.jsonl").write_text("".join(broken))
    computed, said = run()
    assert computed == [1]
    assert "squares.cells.jsonl, line 2" in " ".join(said.split())


def test_other_parameters_model_or_version_are_other_cells(out: Path, run: Run) -> None:
    run("--prompts", "2")
    assert run("--prompts", "3")[0] == [2]
    assert run("--prompts", "2", "--tokens", "9")[0] == [0, 1]
    assert run("--prompts", "2", "--depends", "b")[0] == [0, 1]
    assert run("--prompts", "2", "--version", "2")[0] == [0, 1]
    assert run("--prompts", "3")[0] == []


def test_fresh_forgets_and_quick_stands_beside(out: Path, run: Run) -> None:
    assert run()[0] == [0, 1, 2, 3]
    assert run("--quick")[0] == [0, 1]
    assert run("--quick", "--fresh")[0] == [0, 1]
    assert run()[0] == []
    assert run("--fresh")[0] == [0, 1, 2, 3]


def test_cells_of_other_code_count_and_are_told_of(out: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    of_code("old", monkeypatch)
    run("--prompts", "2")
    facts = json.loads((out / "squares.json").read_text())
    assert facts["note"] == "emulated: none"
    of_code("new", monkeypatch)
    computed, said = run("--prompts", "3")
    assert computed == [2]
    assert "2 of 2 finished cells computed by other code than this; --fresh" in " ".join(said.split())
    facts = json.loads((out / "squares.json").read_text())
    assert facts["note"] == "emulated: none; 2 of 3 finished cells computed by other code than this"
    assert "other code" not in run("--prompts", "3", "--fresh")[1]


def test_lines_of_before_that_do_not_say_their_code_are_other_code(out: Path, run: Run) -> None:
    run()
    old = [{name: value for name, value in json.loads(line).items() if name != "code"} for line in lines(out)]
    (out / "squares.cells.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    computed, said = run()
    assert computed == []
    assert "4 of 4 finished cells computed by other code than this" in " ".join(said.split())


def test_what_a_killed_run_left_beside_its_cells_is_removed(out: Path, run: Run) -> None:
    def beside() -> tuple[int, int]:
        return len(list(out.glob(".squares.scratch-*"))), len(list((out / "squares.files").glob("*")))

    killed(out, at=2)
    assert beside() == (1, 3)
    run("--prompts", "2")
    assert beside() == (0, 2)
    run("--prompts", "1", "--fresh")
    assert beside() == (0, 1)


def test_interrupted_says_how_to_go_on(out: Path, run: Run) -> None:
    process = start(out, "--sleeps-at", "2")
    deadline = time.monotonic() + 60
    while calls(out) != [0, 1, 2] and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "2 of 4 cells are kept; the same command goes on" in " ".join(said.split())
    assert "Traceback" not in said
    assert run()[0] == [2, 3]


def test_one_run_at_a_time_writes_a_file(out: Path, run: Run) -> None:
    run()
    with (out / "squares.cells.jsonl").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another run" in run(code=1)[1]


def test_machine_command_and_note_stand_in_what_is_written(out: Path, run: Run) -> None:
    run("--drawn", "--seed", "3")
    facts = json.loads((out / "squares.json").read_text())
    assert facts["command"].endswith(f"squares.py --out {out} --drawn --seed 3")
    assert facts["note"] == "emulated: none"
    assert facts["mean"] == 1.5
    assert [row["square"] for row in facts["rows"]] == [0, 1, 4, 9]
    text = (out / "squares.csv").read_text().splitlines()
    names = ("machine", "command", "commit", "model", "note")
    assert text[:5] == [f"# {name}: {facts[name]}" for name in names]
    table = list(csv.DictReader(text[5:]))
    assert [(row["x"], row["square"], row["by_token"]) for row in table][3] == ("3", "9", "[0.5, 3]")
    assert (out / "squares.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

"""Cells of an experiment are computed once, whatever happens to the process that computes them.

Each run is a process of its own, and writes what it computes to a file that the script under test knows nothing of.
"""

from __future__ import annotations

import csv
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.paths import ROOT

PROGRAM = """
import os, signal, time
from scripts.lib import experiment as cells

os.chdir(os.environ["FOLDER"])

def measure(params):
    with open("calls", "a") as file:
        file.write(f"{params['x']}\\n")
    run.path(params, ".part").write_text("so far")
    with run.scratch():
        compute(params)
    return {"square": params["x"] ** 2, "by_token": [0.5, params["x"]]}

def compute(params):
    if params["x"] == int(os.environ.get("KILLED_AT", -1)):
        os.kill(os.getpid(), signal.SIGKILL)
    if params["x"] == int(os.environ.get("SLEEPS_AT", -1)):
        time.sleep(60)

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell has put the tests behind
if "CODE" in os.environ:
    cells._sources = lambda package: os.environ["CODE"] + package
args = cells.parse(cells.flags("about", (4, 2), (8, 4)))
depends = {"model": os.environ.get("MODEL", "a")}
with cells.Experiment("squares", args, int(os.environ.get("VERSION", 1)), depends, "emulated: none") as run:
    wanted = [cells.Cell({"x": x, "tokens": args.tokens}, cost=x + 1.0) for x in range(args.prompts)]
    found = run.all(wanted, measure)
    run.write([{**cell.params, **one} for cell, one in zip(wanted, found, strict=True)], mean=1.5)
    if "DRAWN" in os.environ:
        figure, (panel,) = cells.canvas(5, 3)
        panel.plot([one["square"] for one in found])
        print(run.save(figure))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def start(folder: Path, *flags: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, "--out", "out", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, **environment, "FOLDER": str(folder)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)  # type: ignore[call-overload,no-any-return]


def run(folder: Path, *flags: str, code: int = 0, **environment: str) -> tuple[list[int], str]:
    """What was computed, and what was said on standard error."""
    (folder / "calls").unlink(missing_ok=True)
    process = start(folder, *flags, **environment)
    _, said = process.communicate(timeout=120)
    assert process.returncode == code, said
    return calls(folder), said


def calls(folder: Path) -> list[int]:
    file = folder / "calls"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def lines(folder: Path) -> list[str]:
    return (folder / "out" / "squares.cells.jsonl").read_text().splitlines(keepends=True)


def test_killed_within_a_cell_goes_on_with_that_cell_and_runs_nothing_twice(folder: Path) -> None:
    assert run(folder, code=-signal.SIGKILL, KILLED_AT="2")[0] == [0, 1, 2]
    assert not (folder / "out" / "squares.json").exists()
    assert run(folder)[0] == [2, 3]
    computed, said = run(folder)
    assert computed == []
    assert "4 of 4 cells were finished before" in said


@pytest.mark.parametrize("left", [1, 20, -1])
def test_killed_in_the_middle_of_a_write_only_that_cell_is_computed_again(folder: Path, left: int) -> None:
    """`left`: characters of the last line that had reached the disk."""
    run(folder)
    *whole, last = lines(folder)
    (folder / "out" / "squares.cells.jsonl").write_text("".join(whole) + last[:left])
    assert run(folder)[0] == [3]
    assert [json.loads(line)["result"]["square"] for line in lines(folder)] == [0, 1, 4, 9]
    assert run(folder)[0] == []


def test_a_line_that_cannot_be_read_is_named_and_its_cell_computed_again(folder: Path) -> None:
    run(folder)
    broken = lines(folder)
    broken[1] = broken[1][:30] + "\n"
    (folder / "out" / "squares.cells.jsonl").write_text("".join(broken))
    computed, said = run(folder)
    assert computed == [1]
    assert "squares.cells.jsonl, line 2" in " ".join(said.split())


def test_other_parameters_model_or_version_are_other_cells(folder: Path) -> None:
    run(folder, "--prompts", "2")
    assert run(folder, "--prompts", "3")[0] == [2]
    assert run(folder, "--prompts", "2", "--tokens", "9")[0] == [0, 1]
    assert run(folder, "--prompts", "2", MODEL="b")[0] == [0, 1]
    assert run(folder, "--prompts", "2", VERSION="2")[0] == [0, 1]
    assert run(folder, "--prompts", "3")[0] == []


def test_fresh_forgets_and_quick_stands_beside(folder: Path) -> None:
    assert run(folder)[0] == [0, 1, 2, 3]
    assert run(folder, "--quick")[0] == [0, 1]
    assert run(folder, "--quick", "--fresh")[0] == [0, 1]
    assert run(folder)[0] == []
    assert run(folder, "--fresh")[0] == [0, 1, 2, 3]


def test_cells_of_other_code_count_and_are_told_of(folder: Path) -> None:
    run(folder, "--prompts", "2", CODE="old")
    facts = json.loads((folder / "out" / "squares.json").read_text())
    assert facts["note"] == "emulated: none"
    computed, said = run(folder, "--prompts", "3", CODE="new")
    assert computed == [2]
    assert "2 of 2 finished cells computed by other code than this; --fresh" in " ".join(said.split())
    facts = json.loads((folder / "out" / "squares.json").read_text())
    assert facts["note"] == "emulated: none; 2 of 3 finished cells computed by other code than this"
    assert "other code" not in run(folder, "--prompts", "3", "--fresh", CODE="new")[1]


def test_lines_of_before_that_do_not_say_their_code_are_other_code(folder: Path) -> None:
    run(folder)
    old = [{name: value for name, value in json.loads(line).items() if name != "code"} for line in lines(folder)]
    (folder / "out" / "squares.cells.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    computed, said = run(folder)
    assert computed == []
    assert "4 of 4 finished cells computed by other code than this" in " ".join(said.split())


def test_what_a_killed_run_left_beside_its_cells_is_removed(folder: Path) -> None:
    def beside() -> tuple[int, int]:
        out = folder / "out"
        return len(list(out.glob(".squares.scratch-*"))), len(list((out / "squares.files").glob("*")))

    run(folder, code=-signal.SIGKILL, KILLED_AT="2")
    assert beside() == (1, 3)
    run(folder, "--prompts", "2")
    assert beside() == (0, 2)
    run(folder, "--prompts", "1", "--fresh")
    assert beside() == (0, 1)


def test_interrupted_says_how_to_go_on(folder: Path) -> None:
    process = start(folder, SLEEPS_AT="2")
    deadline = time.monotonic() + 60
    while calls(folder) != [0, 1, 2] and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "2 of 4 cells are kept; the same command goes on" in " ".join(said.split())
    assert "Traceback" not in said
    assert run(folder)[0] == [2, 3]


def test_one_run_at_a_time_writes_a_file(folder: Path) -> None:
    run(folder)
    with (folder / "out" / "squares.cells.jsonl").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another run" in run(folder, code=1)[1]


def test_machine_command_and_note_stand_in_what_is_written(folder: Path) -> None:
    run(folder, "--seed", "3", DRAWN="1")
    out = folder / "out"
    facts = json.loads((out / "squares.json").read_text())
    assert facts["command"].endswith(" --out out --seed 3")
    assert facts["note"] == "emulated: none"
    assert facts["mean"] == 1.5
    assert [row["square"] for row in facts["rows"]] == [0, 1, 4, 9]
    text = (out / "squares.csv").read_text().splitlines()
    names = ("machine", "command", "model", "note")
    assert text[:4] == [f"# {name}: {facts[name]}" for name in names]
    table = list(csv.DictReader(text[4:]))
    assert [(row["x"], row["square"], row["by_token"]) for row in table][3] == ("3", "9", "[0.5, 3]")
    assert (out / "squares.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

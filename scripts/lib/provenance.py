"""What stands beside every figure: the machine it was measured on, and the command that reproduces it."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts.lib.paths import RESULTS, ROOT


def machine() -> str:
    """Processor, cores, memory and the versions that decide results."""
    name = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    python = platform.python_version()
    return (
        f"{name}, {cores} cores, {gib:.0f} GiB, Python {python}, "
        f"torch {version('torch')}, transformers {version('transformers')}"
    )


def program() -> list[str]:
    """What Python was told to run, from the root of the project: `-m` and a module, or a file that is no script."""
    started = Path(sys.argv[0])
    if not started.resolve().is_relative_to(ROOT / "scripts"):
        return [str(started)]
    parts = started.resolve().relative_to(ROOT).with_suffix("").parts
    return ["-m", ".".join(parts).removesuffix(".__main__")]


def command() -> str:
    """The command line that reproduces this run."""
    return shlex.join([".venv/bin/python", *program(), *sys.argv[1:]])


def header(title: str) -> None:
    print(f"# {title}\nmachine: {machine()}\ncommand: {command()}\n", flush=True)


def commit() -> str:
    """Of the code that runs; "-dirty" if files were changed since. Empty outside a git checkout."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(asked, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def save_rows(name: str, rows: list[dict[str, Any]], folder: Path = RESULTS) -> Path:
    """Rows with machine, command and commit, as NAME.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    facts = {"machine": machine(), "command": command(), "commit": commit(), "when": time.strftime("%Y-%m-%d %H:%M")}
    path.write_text(json.dumps({**facts, "rows": rows}, indent=1))
    return path

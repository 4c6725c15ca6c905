"""What every script prints and writes: the machine it ran on, the command that reproduces it, progress, results."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PROMPTS = ROOT / "tests" / "data" / "gsm8k_prompts.json"
DEMO = ROOT / "models" / "demo-moe"


def prompts(count: int) -> list[str]:
    """The first `count` GSM8K test prompts."""
    return json.loads(PROMPTS.read_text())[:count]


def machine() -> str:
    """Processor, cores, memory and the versions that decide results."""
    import torch
    import transformers

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
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


def command() -> str:
    """The command line that reproduces this run."""
    return shlex.join([".venv/bin/python", f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def header(title: str) -> None:
    print(f"# {title}\nmachine: {machine()}\ncommand: {command()}\n", flush=True)


def save(name: str, rows: list[dict[str, Any]]) -> Path:
    """Rows with machine and command, as results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    facts = {"machine": machine(), "command": command(), "when": time.strftime("%Y-%m-%d %H:%M"), "rows": rows}
    path.write_text(json.dumps(facts, indent=1))
    return path

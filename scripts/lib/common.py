"""What every script prints and writes: the machine it ran on, the command that reproduces it, progress, results."""

from __future__ import annotations

import json
import os
import platform
import random
import shlex
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
PROMPTS = ROOT / "tests" / "data" / "gsm8k_prompts.json"
DEMO = ROOT / "models" / "demo-moe"
DEEP = ROOT / "models" / "deep-moe"


def prompts(count: int) -> list[str]:
    """The first `count` GSM8K test prompts."""
    return json.loads(PROMPTS.read_text())[:count]


def prompts_of_length(tokenizer: Any, count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of exactly `tokens` token ids each, the tokenizer's special tokens at the beginning among them.

    GSM8K test problems in an order drawn by `seed`, each begun by another problem, gone on with the next ones where it
    is too short and cut where it is too long. Past the last problem they begin again, further on in the text.
    """
    texts = prompts(1 << 30)
    random.Random(seed).shuffle(texts)
    bare: list[list[int]] = [tokenizer(text + "\n", add_special_tokens=False)["input_ids"] for text in texts]
    whole: list[int] = tokenizer(texts[0])["input_ids"]
    special = set(tokenizer.all_special_ids)
    first = next((n for n, token in enumerate(whole) if token not in special), 0)
    joined = [token for one in bare for token in one]
    starts = [sum(map(len, bare[:n])) for n in range(len(bare))]
    found = []
    for number in range(count):
        start = starts[number % len(bare)] + 7 * (number // len(bare))
        need = tokens - first
        body = [joined[(start + n) % len(joined)] for n in range(need)]
        found.append((whole[:first] + body)[:tokens])
    return found


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


def command() -> str:
    """The command line that reproduces this run, from the root of the project."""
    program = Path(sys.argv[0])
    if program.resolve().is_relative_to(ROOT / "scripts"):
        parts = program.resolve().relative_to(ROOT).with_suffix("").parts
        words = ["-m", ".".join(parts).removesuffix(".__main__")]
    else:
        words = [str(program)]
    return shlex.join([".venv/bin/python", *words, *sys.argv[1:]])


def header(title: str) -> None:
    print(f"# {title}\nmachine: {machine()}\ncommand: {command()}\n", flush=True)


def save(name: str, rows: list[dict[str, Any]]) -> Path:
    """Rows with machine and command, as results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    facts = {"machine": machine(), "command": command(), "when": time.strftime("%Y-%m-%d %H:%M"), "rows": rows}
    path.write_text(json.dumps(facts, indent=1))
    return path

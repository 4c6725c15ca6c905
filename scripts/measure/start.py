"""How long a start takes: the first token from process start, beside Transformers, and commands that run no model.

Every command is a process of its own, in turns, with the same number of threads. Processor time is shown as well, since
other load of the machine disturbs it less. `--before` adds the commands of another checkout to each turn.

    .venv/bin/python -m scripts.measure.start --quick
    git worktree add ../before 82a83e2; .venv/bin/python -m scripts.measure.start --before ../before
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import DEMO, ROOT
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table

PROMPT = "Question: Tom has 3 apples and buys 5 more. How many apples does Tom have?\nAnswer:"
LIMIT_S = 300.0
"""No command takes as long."""
TRANSFORMERS = "Transformers"
FIRST_TOKEN = "first token"

THEIRS = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

path, threads, prompt = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(threads)
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", experts_implementation="eager")
ids = tokenizer(prompt, return_tensors="pt")
found = model.generate(**ids, max_new_tokens=1, do_sample=False)
print(repr(tokenizer.decode(found[0, -1:])), flush=True)
"""
"""What a user of Transformers alone would write."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One command, started in the folder `root`."""

    name: str
    root: Path
    arguments: tuple[str, ...]
    """Of Python."""

    def seconds(self, environ: dict[str, str]) -> tuple[float, float]:
        """Until the first byte of its output, and processor time of the whole process and its children. Raises
        CalledProcessError, TimeoutExpired."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        command = [sys.executable, *self.arguments]
        with subprocess.Popen(
            command,
            cwd=self.root,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None
            first = process.stdout.read(1)
            found = time.perf_counter() - began
            _, complaint = process.communicate(timeout=LIMIT_S)
        if process.returncode or not first:
            raise subprocess.CalledProcessError(process.returncode, command, stderr=complaint)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return found, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def commands(root: Path, model: str, threads: int, label: str = "") -> list[Timed]:
    """Those of the checkout at `root`."""
    answer = ("generate", "-m", model, "--system", "fully-cached", "-n", "1", "--json", "--threads", str(threads))
    plan = ("plan", "-m", "tests/data/configs/mixtral-8x7b.json", "--workers", "8", "--worker-memory", "1GB")
    found = {
        FIRST_TOKEN: (*answer, PROMPT),
        "plan": plan,
        "--help": ("--help",),
        "simulate": ("simulate", "--system", "od-moe", "--tokens", "64"),
    }
    return [Timed(label + name, root, ("-m", "odmoe", *arguments)) for name, arguments in found.items()]


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default=str(DEMO.relative_to(ROOT)), help="%(default)s by default")
    parser.add_argument("--threads", type=positive, default=1, help="of each process (%(default)s)")
    parser.add_argument("--turns", type=positive, help="11 by default")
    parser.add_argument("--before", type=Path, help="another checkout to measure in the same turns")
    parser.add_argument("--quick", action="store_true", help="three turns")
    args = parser.parse_args()
    header("Start")
    turns = args.turns or (3 if args.quick else 11)
    model = str((ROOT / args.model).resolve())
    theirs = Timed(TRANSFORMERS, ROOT, ("-c", THEIRS, model, str(args.threads), PROMPT))
    timed = [theirs, *commands(ROOT, model, args.threads)]
    if args.before is not None:
        timed += commands(args.before.resolve(), model, args.threads, "before: ")
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    seconds: dict[str, list[tuple[float, float]]] = {one.name: [] for one in timed}
    for turn in range(turns + 1):
        for one in timed:
            took = one.seconds(environ)
            if turn:  # the first one fills caches, and makes the store
                seconds[one.name].append(took)
    rows = [row(name, seconds) for name in seconds]
    print(text_table(columns(TRANSFORMERS, *(["before"] if args.before else [])), rows))
    print(f"saved: {save_rows('start-quick' if args.quick else 'start', rows)}")


def row(name: str, seconds: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Medians over the turns; ratios are of the same turn."""
    found: dict[str, Any] = {"name": name}
    others = {"transformers": TRANSFORMERS if name.endswith(FIRST_TOKEN) else None, "before": f"before: {name}"}
    for at, kind in enumerate(("wall", "processor")):
        mine = [pair[at] for pair in seconds[name]]
        found |= {f"{kind}_s": statistics.median(mine), f"{kind}_least_s": min(mine), f"{kind}_all_s": mine}
        for key, other in others.items():
            if other in seconds:
                theirs = [pair[at] for pair in seconds[other]]
                ratios = [one / that for one, that in zip(mine, theirs, strict=True)]
                found[f"{kind}_of_{key}"] = statistics.median(ratios)
    return found


def columns(*others: str) -> list[Column]:
    """Of those that are compared with."""
    found = [Column("command", "name")]
    for kind in ("wall", "processor"):
        found.append(Column(f"{kind} s", f"{kind}_s", ".2f"))
        found.append(Column("least", f"{kind}_least_s", ".2f"))
        found += [Column(f"of {other}", f"{kind}_of_{other.lower()}", ".2f") for other in others]
    return found


if __name__ == "__main__":
    main()

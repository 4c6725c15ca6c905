"""From process start to the first token: `odmoe generate`, embedded, beside Transformers alone, in turns.

.venv/bin/python -m scripts.measure.startup            # 5 turns each, median, ratio
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import track

from scripts.lib.flags import script_parser
from scripts.lib.paths import DEMO
from scripts.lib.prompts import gsm8k_prompts
from scripts.lib.provenance import header, save_rows

PEER = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], experts_implementation="eager")
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer(sys.argv[2], return_tensors="pt")
with torch.inference_mode():
    out = model.generate(**ids, max_new_tokens=1, do_sample=False)
print(tokenizer.decode(out[0, ids["input_ids"].shape[1]:]), flush=True)
"""


def first_byte_s(command: list[str], environment: dict[str, str]) -> tuple[float, str]:
    """Seconds until the command says anything on standard output, and what it says first."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        if process.stdout is None:
            raise RuntimeError("no pipe")
        first = process.stdout.read(1)
        took = time.perf_counter() - start
        rest = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"{command[:3]} failed with {process.returncode}")
    return took, (first + rest).decode()


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--shadow", default="int8")
    args = parser.parse_args()
    header("From process start to first token")
    prompt = gsm8k_prompts(1)[0]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    python = sys.executable
    ours = [python, "-m", "odmoe.cli.main", "generate", "-m", args.model, "--shadow", args.shadow, "-n", "4", prompt]
    commands = {"odmoe generate, embedded": ours, "Transformers": [python, "-c", PEER, args.model, prompt]}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in track(range(args.turns), console=Console(stderr=True), description="turns"):
        for name, command in commands.items():
            times[name].append(first_byte_s(command, environment)[0])
    rows: list[dict[str, Any]] = []
    for name, seconds in times.items():
        rows.append({"what": name, "median_s": statistics.median(seconds), "all_s": seconds})
        print(f"{name:<26} median {statistics.median(seconds):.2f} s, all {' '.join(f'{s:.2f}' for s in seconds)}")
    ratio = rows[0]["median_s"] / rows[1]["median_s"]
    print(f"ratio {ratio:.2f}; written to {save_rows('startup', rows)}")


if __name__ == "__main__":
    main()

"""Scores of EleutherAI's lm-evaluation-harness through `odmoe serve`, beside those of its own `hf` model.

Two local tasks on the problems of scripts/data/gsm8k_test.jsonl, on the same checkpoint: which of four solutions
belongs to a problem (log-likelihoods of prompts, echoed), and solutions that are generated up to a stop text. Scores
must be the same, each text too, and each log-likelihood to rounding.

The harness is no requirement of the project: install it with `pip install -e '.[evaluation]'`, or name the Python of
another environment that has it.

    .venv/bin/python -m scripts.service.evaluation
    .venv/bin/python -m scripts.service.evaluation --quick --python /opt/harness/bin/python
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from scripts.lib.flags import script_parser
from scripts.lib.paths import DEMO, ROOT
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table
from scripts.service.server import ServerProcess

PROBLEMS = ROOT / "scripts" / "data" / "gsm8k_test.jsonl"
CHOICES = 4
"""Solutions to choose from: the problem's own, and those of the problems after it."""
TOKENS = 48
LIMIT_S = 3600.0
CLOSE = 1e-3
"""Log-likelihoods of some hundred tokens, summed in float32, that differ by less are the same but for rounding."""
BOTH = {"add_bos_token": True}
"""Otherwise `hf` adds the tokenizer's first token, and `local-completions` does not."""
TASKS: dict[str, dict[str, Any]] = {
    "which_solution": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "solutions",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "solution": {
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "solution",
        "generation_kwargs": {"until": ["\n\n", "Question:"], "max_gen_toks": TOKENS, "do_sample": False},
        "metric_list": [{"metric": "bleu"}],
    },
}
COLUMNS = (
    Column("task", "task"),
    Column("score", "score"),
    Column("hf", "hf", ".4f"),
    Column("odmoe serve", "served", ".4f"),
    Column("samples", "samples", "d"),
    Column("that differ", "different", "d"),
    Column("farthest", "farthest", ".1e"),
)


def write_tasks(folder: Path, count: int) -> None:
    """The tasks' descriptions, and a line of data for each problem."""
    problems = [json.loads(line) for line in PROBLEMS.read_text(encoding="utf-8").splitlines()]
    solutions = [" " + one["answer"] for one in problems]
    with (folder / "problems.jsonl").open("w", encoding="utf-8") as out:
        for number, problem in enumerate(problems[:count]):
            right = number % CHOICES
            others = [solutions[(number + step) % len(problems)] for step in range(1, CHOICES)]
            line = {
                "question": problem["question"],
                "solution": solutions[number],
                "solutions": [*others[:right], solutions[number], *others[right:]],
                "right": right,
            }
            out.write(json.dumps(line) + "\n")
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "problems.jsonl")}}}
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **data, "test_split": "test", **task}))


def evaluate(python: str, tasks: Path, out: Path, model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Scores and samples of the harness' run. Raises SystemExit with its last lines where it fails."""
    command = [python, "-m", "lm_eval", "--model", model, "--tasks", ",".join(TASKS), "--include_path", str(tasks)]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()), "--batch_size", "1"]
    command += ["--output_path", str(out), "--log_samples", "--device", "cpu"]
    environment = os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        command, cwd=out.parent, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    results = sorted(out.rglob("results_*.json"))
    if done.returncode or not results:
        sys.exit(f"the harness has failed with {model}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = {"scores": json.loads(results[-1].read_text())["results"], "samples": {}}
    for name in TASKS:
        (file,) = sorted(out.rglob(f"samples_{name}_*.jsonl"))
        samples = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        found["samples"][name] = sorted(samples, key=lambda one: one["doc_id"])
    return found


def compared(hf: dict[str, Any], served: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each score."""
    rows = []
    for name in TASKS:
        pairs = list(zip(hf["samples"][name], served["samples"][name], strict=True))
        gaps = [distance(one["filtered_resps"], other["filtered_resps"]) for one, other in pairs]
        for score, value in hf["scores"][name].items():
            if isinstance(value, float) and "stderr" not in score:
                rows.append(
                    {
                        "task": name,
                        "score": score.partition(",")[0],
                        "hf": value,
                        "served": served["scores"][name][score],
                        "samples": len(pairs),
                        "different": sum(gap > CLOSE for gap in gaps),
                        "farthest": max(gaps),
                    }
                )
    return rows


def distance(one: list[Any], other: list[Any]) -> float:
    """Between two responses: of log-likelihoods the largest difference, of texts 0 or infinite."""
    if isinstance(one[0], str):
        return 0.0 if one == other else float("inf")
    return max(abs(float(mine[0]) - float(theirs[0])) for mine, theirs in zip(one, other, strict=True))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--python", default=sys.executable, help="one that has lm_eval (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="6 problems (40)")
    args = parser.parse_args()
    header("lm-evaluation-harness through odmoe serve")
    model = args.model.resolve()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_tasks(folder, 6 if args.quick else 40)
        hf = evaluate(args.python, folder, folder / "hf", "hf", {"pretrained": model, "dtype": "float32", **BOTH})
        server = ServerProcess("--dtype", "float32", "--shadow", "none", model=model)
        try:
            arguments = {
                "model": model.name,
                "base_url": f"{server.url}/v1/completions",
                "tokenizer": model,
                "num_concurrent": 4,
                "max_retries": 1,
                **BOTH,
            }
            served = evaluate(args.python, folder, folder / "served", "local-completions", arguments)
        finally:
            server.close()
    rows = compared(hf, served)
    print(text_table(COLUMNS, rows))
    print(f"\nwritten to {save_rows('evaluation', rows)}")
    sys.exit(any(row["different"] or abs(row["hf"] - row["served"]) > CLOSE for row in rows))


if __name__ == "__main__":
    main()

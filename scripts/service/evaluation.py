"""Scores of EleutherAI's lm-evaluation-harness through `odmoe serve`, beside those of its own `hf` model.

Two local tasks on the problems of scripts/data/gsm8k_test.jsonl, on the same checkpoint: which of four solutions
belongs to a problem (log-likelihoods of prompts, echoed), and solutions that are generated up to a stop text. Scores
must be the same, each text too, and each log-likelihood to rounding.

The harness is no requirement of the project: install it with `pip install -e '.[evaluation]'`, or name the Python of
another environment that has it.

    .venv/bin/python -m scripts.service.evaluation
    .venv/bin/python -m scripts.service.evaluation --quick --python /opt/harness/bin/python

Exit code 1: a score or a response differs.
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

from scripts.lib.flags import positive, script_parser
from scripts.lib.paths import DEEP, DEMO, RESULTS
from scripts.lib.prompts import gsm8k_rows
from scripts.lib.provenance import header, save_rows
from scripts.lib.tables import Column, text_table
from scripts.service.server import ServerProcess

PROBLEMS = 40
"""It has so many."""
CHOICES = 4
"""Solutions to choose from: the problem's own, and those of the problems after it."""
TOKENS = 48
LIMIT_S = 3600.0
CLOSE = 1e-3
"""Log-likelihoods of some hundred tokens, summed in float32, that differ by less are the same but for rounding."""
BOTH = {"add_bos_token": True}
"""Unless told, `hf` begins prompts with the special tokens that the tokenizer adds, `local-completions` with none."""
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
    Column("model", "model"),
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
    problems = gsm8k_rows()
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


def compared(model: str, hf: dict[str, Any], served: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each score."""
    rows = []
    for name in TASKS:
        pairs = list(zip(hf["samples"][name], served["samples"][name], strict=True))
        responses = [(one["filtered_resps"], other["filtered_resps"]) for one, other in pairs]
        gaps = [gap for one, other in responses if (gap := distance(one, other)) is not None]
        for score, value in hf["scores"][name].items():
            if isinstance(value, float) and "stderr" not in score:
                rows.append(
                    {
                        "model": model,
                        "task": name,
                        "score": score.partition(",")[0],
                        "hf": value,
                        "served": served["scores"][name][score],
                        "samples": len(pairs),
                        "different": sum(not same(one, other) for one, other in responses),
                        "farthest": max(gaps, default=None),
                    }
                )
    return rows


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether two responses are: texts that are equal, or log-likelihoods that are close and alike in which of them
    are those of the greedy continuation."""
    gap = distance(one, other)
    if gap is None:
        return one == other
    return gap <= CLOSE and [str(mine[1]) for mine in one] == [str(theirs[1]) for theirs in other]


def distance(one: list[Any], other: list[Any]) -> float | None:
    """The largest difference of log-likelihoods; None of texts."""
    if isinstance(one[0], str):
        return None
    return max(abs(float(mine[0]) - float(theirs[0])) for mine, theirs in zip(one, other, strict=True))


def broken(rows: list[dict[str, Any]]) -> list[str]:
    """What is not as the harness' own model has it, a line each."""
    return [
        f"{row['model']}, {row['task']}, {row['score']}: {row['served']:.6f} for {row['hf']:.6f}, and "
        f"{row['different']} of {row['samples']} responses differ"
        for row in rows
        if row["different"] or row["hf"] != row["served"]
    ]


def evaluate_both(python: str, model: Path, problems: int) -> list[dict[str, Any]]:
    """One checkpoint's rows."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_tasks(folder, problems)
        print(f"{model.name}: the harness' own model", file=sys.stderr, flush=True)
        hf = evaluate(python, folder, folder / "hf", "hf", {"pretrained": model, "dtype": "float32", **BOTH})
        print(f"{model.name}: odmoe serve", file=sys.stderr, flush=True)
        with ServerProcess("--dtype", "float32", "--shadow", "none", model=model) as server:
            arguments = {
                "model": model.name,
                "base_url": f"{server.url}/v1/completions",
                "tokenizer": model,
                "num_concurrent": 4,
                "max_retries": 1,
                **BOTH,
            }
            served = evaluate(python, folder, folder / "served", "local-completions", arguments)
    return compared(model.name, hf, served)


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--models", type=Path, nargs="+", default=[DEMO, DEEP], help="checkpoints (demo-moe, deep-moe)")
    parser.add_argument("--python", default=sys.executable, help="one that has lm_eval (%(default)s)")
    parser.add_argument("--problems", type=positive, help=f"at most {PROBLEMS} ({PROBLEMS}; --quick: 6)")
    parser.add_argument("--quick", action="store_true", help="6 problems")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory to write to (results/)")
    args = parser.parse_args()
    problems = min(args.problems or (6 if args.quick else PROBLEMS), PROBLEMS)
    header("lm-evaluation-harness through odmoe serve")
    name = "evaluation-quick" if args.quick else "evaluation"
    rows: list[dict[str, Any]] = []
    for model in args.models:
        rows += evaluate_both(args.python, model.resolve(), problems)
        path = save_rows(name, rows, args.out)
    print(text_table(COLUMNS, rows))
    print(f"\nwritten to {path}")
    found = broken(rows)
    print("\n".join(f"NOT THE SAME: {one}" for one in found))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())

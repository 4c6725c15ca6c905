"""Trains the token-wise predictor of a checkpoint (SMOE, section IV-D): a matrix of the gate's shape a MoE layer.

    .venv/bin/python -m scripts.models.train_predictor models/demo-moe
    .venv/bin/python -m scripts.models.train_predictor models/deep-moe --quick --out /tmp/token_predictor.safetensors

Transformers answers GSM8K test problems, none of those that experiments measure on. From the gate input of each decoded
token and what the gate chose at the next one, each layer learns by itself (cross-entropy against the next top-k, in
proportion to their scores). Accuracy: the part of the next top-k that is among the predicted, on answers that were not
learned from; beside it that of naming this token's own experts again. Written: MODEL/token_predictor.safetensors, which
`--predictor token-wise` reads, and its line in the model's SHA256SUMS.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from checkpoint import token_predictor
from checkpoint.token_predictor import FILE, TokenPredictor, targets
from scripts.lib.flags import script_parser
from scripts.lib.provenance import command, header, machine
from scripts.lib.routes import MEASURED, Watched, hits, problems

RATE, DECAY = 0.02, 1.0


@dataclass
class Samples:
    """Of one layer, a row a decoded token: `inputs` [N, H], its gate input; `following` [N, E], the scores of the next
    token's gate; `chosen` [N, k], its choice; `own` [N, E], this token's scores."""

    inputs: torch.Tensor
    following: torch.Tensor
    chosen: torch.Tensor
    own: torch.Tensor


def collect(watched: Watched, texts: list[str], tokens: int, bar: Progress) -> dict[int, Samples]:
    """Samples of every layer, from the greedy answers to these prompts."""
    parts: dict[int, list[tuple[torch.Tensor, ...]]] = {layer: [] for layer in watched.shape.layers}
    task = bar.add_task("decoding", total=len(texts) * tokens)
    for number, text in enumerate(texts, 1):
        decoded = []
        for one in watched.answer(watched.encode(text), tokens):
            if one.tokens == 1:
                decoded.append(one)
                bar.advance(task)
        bar.update(task, completed=number * tokens)
        for now, then in itertools.pairwise(decoded):
            for layer, kept in parts.items():
                kept.append((now.inputs[layer], then.scores[layer], then.index[layer], now.scores[layer]))
    if not all(parts.values()):
        raise SystemExit("no answer has two decoded tokens; give more --samples or --tokens")
    return {layer: Samples(*(torch.cat(column) for column in zip(*kept, strict=True))) for layer, kept in parts.items()}


def fit(samples: Samples, top_k: int, steps: int) -> torch.Tensor:
    """[E, H], of the least cross-entropy against what the next gate chose; from zeros, so no seed is in it."""
    weight = torch.zeros(samples.following.shape[1], samples.inputs.shape[1], requires_grad=True)
    wanted = targets(samples.following, top_k).clone()
    inputs = samples.inputs.clone()  # out of inference mode
    optimiser = torch.optim.AdamW([weight], lr=RATE / inputs.square().mean().sqrt().item(), weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(inputs @ weight.T, wanted).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    return weight.detach()


def parse() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("model", type=Path, help="a checkpoint's directory")
    parser.add_argument("--samples", type=int, help="answers, a fifth of them held out; 20 unless said")
    parser.add_argument("--tokens", type=int, help="of each answer; 100 unless said")
    parser.add_argument("--steps", type=int, default=300, help="of each layer's training; %(default)s unless said")
    parser.add_argument("--seed", type=int, default=0, help="draws which problems, and which are held out")
    parser.add_argument("--quick", action="store_true", help="4 answers of 24 tokens, unless said")
    parser.add_argument("--out", type=Path, help=f"file to write; MODEL/{FILE} unless said")
    args = parser.parse_args()
    args.samples = args.samples or (4 if args.quick else 20)
    args.tokens = args.tokens or (24 if args.quick else 100)
    most = len(problems()) - MEASURED
    if not 2 <= args.samples <= most or args.tokens < 2 or args.steps < 1:
        parser.error(f"--samples {args.samples}, allowed: 2 to {most}; --tokens {args.tokens}, 2 and more; --steps 1")
    if not (args.model / "config.json").is_file():
        parser.error(f"{args.model} holds no config.json; give a checkpoint's directory")
    args.out = args.out or args.model / FILE
    return args


def train(watched: Watched, args: argparse.Namespace, bar: Progress) -> tuple[TokenPredictor, list[dict[str, float]]]:
    """The predictor, and what each layer reaches on held-out answers."""
    texts = problems()[MEASURED:]
    random.Random(args.seed).shuffle(texts)
    held = max(1, args.samples // 5)
    learned = collect(watched, texts[held : args.samples], args.tokens, bar)
    unseen = collect(watched, texts[:held], args.tokens, bar)
    weights, rows = {}, []
    task = bar.add_task("training", total=len(learned))
    for layer, samples in learned.items():
        weights[layer] = fit(samples, watched.shape.top_k, args.steps)
        bar.advance(task)
        test = unseen[layer]
        total = test.chosen.numel()
        rows.append({
            "layer": layer,
            "accuracy": round(hits(test.inputs @ weights[layer].T, test.chosen) / total, 4),
            "same as this token": round(hits(test.own, test.chosen) / total, 4),
            "chance": round(watched.shape.top_k / test.own.shape[1], 4),
        })  # fmt: skip
    first = next(iter(learned.values()))
    counts = {"learned": len(first.inputs), "held out": len(next(iter(unseen.values())).inputs)}
    facts = {
        "model": args.model.name, "answers": args.samples, "tokens": counts, "steps": args.steps, "seed": args.seed,
        "accuracy by layer": {str(row["layer"]): row["accuracy"] for row in rows},
        "accuracy": round(sum(row["accuracy"] for row in rows) / len(rows), 4),
        "command": command(), "machine": machine(), "when": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    return TokenPredictor(weights, facts), rows


def sign(file: Path) -> None:
    """The file's line in the SHA256SUMS beside it, if there is one: whoever loads the model checks every line."""
    sums = file.with_name("SHA256SUMS")
    if not sums.is_file():
        return
    lines = [line for line in sums.read_text().splitlines() if line.partition(" ")[2].strip("* ") != file.name]
    lines.append(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}")
    partial = sums.with_name(".SHA256SUMS.partial")
    partial.write_text("\n".join(lines) + "\n")
    partial.replace(sums)


def main() -> int:
    args = parse()
    header(f"Token-wise predictor of {args.model.name}")
    watched = Watched(args.model)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        predictor, rows = train(watched, args, bar)
    token_predictor.save(predictor, watched.gates, args.out)
    sign(args.out)
    for row in rows:
        print(json.dumps(row))
    print(json.dumps(predictor.facts, indent=1))
    print(f"written: {args.out}, {args.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

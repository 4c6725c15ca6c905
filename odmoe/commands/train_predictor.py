"""`odmoe train-predictor`: train the token-wise predictor of a checkpoint, write it, and report its recall."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shlex
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from checkpoint.hub import find_model
from checkpoint.prediction import token_predictor
from checkpoint.prediction.token_predictor import FILE, TokenPredictor
from odmoe.api.checks import check_writable
from odmoe.clusters.process import prepare_libraries, prepare_process
from odmoe.commands.whole_model import check_memory, checked_config, load_whole
from odmoe.settings.settings import Settings
from odmoe.terminal import Terminal
from odmoe.text import encode, load_tokenizer
from odmoe.training.observed_model import ObservedModel
from odmoe.training.predictor_training import Recall, Samples, collect, fit, joined, measure
from scheduler.errors import CheckpointError, ConfigError, CorruptCheckpointError
from scheduler.files import write_whole
from wire.machine import processor_name

COLUMNS = ("before", "after", "same", "chance")
HELD_OUT = 5
"""One answer in so many is held out."""


@dataclass(frozen=True, slots=True)
class Training:
    """`tokens` of each answer; `steps` of each layer's training; `seed` draws which answers are held out."""

    tokens: int
    steps: int
    seed: int


def run_train_predictor(
    model: str, prompts: list[str], training: Training, output: Path | None, as_json: bool, terminal: Terminal
) -> None:
    """Train, write and report. `output`: MODEL/token_predictor.safetensors where it is None.

    Raises ConfigError, CheckpointError, DoesNotFitError or PromptError before the model is loaded.
    """
    prepare_process(terminal.debug)
    path = find_model(model)
    config = checked_config(path)
    file = output or path / FILE
    check_writable("--output", str(file))
    context = check_memory(path.name, config, "float32").context_max
    if training.tokens > context - 2:
        raise ConfigError(f"--tokens is {training.tokens}; allowed: 2 to {context - 2}, by the model's context")
    prepare_libraries(Settings().threads_a_node)
    with terminal.status() as say:
        say("loading the whole model with Transformers")
        tokenizer = load_tokenizer(path, CorruptCheckpointError)
        ids = [encode(tokenizer, prompt, context - training.tokens) for prompt in prompts]
        observed = ObservedModel(load_whole(path, "float32"))
    random.Random(training.seed).shuffle(ids)
    held = max(1, len(ids) // HELD_OUT)
    with terminal.progress() as progress:
        samples = collect(observed, ids, training.tokens, progress)
        learned, unseen = joined(samples[held:]), joined(samples[:held])
        weights = {}
        for done, (layer, rows) in enumerate(learned.items(), 1):
            weights[layer] = fit(rows, observed.shape.top_k, training.steps)
            progress("training layers", done, len(learned))
    recalls = measure(weights, _weights_before(file, observed), unseen)
    facts = {
        "model": path.name,
        "answers": len(ids),
        "tokens": {"learned": len(_first(learned).inputs), "held out": len(_first(unseen).inputs)},
        "steps": training.steps,
        "seed": training.seed,
        "accuracy by layer": {str(one.layer): one.after for one in recalls},
        "accuracy": round(sum(one.after for one in recalls) / len(recalls), 4),
        "command": shlex.join(["odmoe", *sys.argv[1:]]),
        "machine": f"{processor_name()}, torch {version('torch')}, transformers {version('transformers')}",
        "when": time.strftime("%Y-%m-%d"),
    }
    token_predictor.save(TokenPredictor(weights, facts), observed.gates, file)
    if file.parent.resolve() == path.resolve():
        sign(file)
    print(json.dumps(as_dict(file, facts, recalls)) if as_json else as_text(file, facts, recalls))


def _weights_before(file: Path, observed: ObservedModel) -> dict[int, Any] | None:
    """Of the file that will be replaced; None where there is none, or one of another model."""
    try:
        return token_predictor.load(file, observed.gates).weights
    except CheckpointError:
        return None


def _first(samples: dict[int, Samples]) -> Samples:
    return next(iter(samples.values()))


def sign(file: Path) -> None:
    """Put the file's checksum into the SHA256SUMS beside it, if there is one: loading the model checks every line."""
    sums = file.with_name("SHA256SUMS")
    if not sums.is_file():
        return
    lines = [line for line in sums.read_text().splitlines() if line.partition(" ")[2].strip("* ") != file.name]
    lines.append(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}")
    write_whole(sums, ("\n".join(lines) + "\n").encode())


def as_dict(file: Path, facts: dict[str, Any], recalls: list[Recall]) -> dict[str, Any]:
    """What --json prints."""
    rows = [dataclasses.asdict(one) for one in recalls]
    return {"file": str(file), "bytes": file.stat().st_size, **facts, "recall": rows}


def as_text(file: Path, facts: dict[str, Any], recalls: list[Recall]) -> str:
    """Recall by layer, and where the file is."""
    tokens = facts["tokens"]
    lines = [
        f"Token-wise predictor of {facts['model']}, {facts['answers']} answers: {tokens['learned']:,} tokens learned, "
        f"{tokens['held out']:,} held out",
        "Recall on the held-out answers, %:",
        "  layer   before    after   same experts again   chance",
        *(_line(str(one.layer), one.before, one.after, one.same, one.chance) for one in recalls),
        _line(
            "mean", *(_mean([getattr(one, name) for one in recalls]) for name in ("before", "after", "same", "chance"))
        ),
        f"written: {file}, {file.stat().st_size:,} bytes",
    ]
    return "\n".join(lines)


def _line(name: str, *shares: float | None) -> str:
    before, after, same, chance = map(_percent, shares)
    return f"  {name:>5} {before:>8} {after:>8} {same:>20} {chance:>8}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

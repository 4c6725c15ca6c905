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
from typing import TYPE_CHECKING, Annotated, Any

import typer

from odmoe.api.checks import check_writable
from odmoe.clusters.process import prepare_libraries, prepare_process
from odmoe.commands.shared.options import Debug, Json, Quiet, option
from odmoe.commands.shared.prompts import read_prompts
from odmoe.settings.settings import Settings
from odmoe.terminal import Terminal
from odmoe.training.domains import training_prompts
from scheduler.errors import CheckpointError, ConfigError, CorruptCheckpointError
from scheduler.files import write_whole
from scheduler.limits import MAX_COUNT

if TYPE_CHECKING:
    from odmoe.training.observed_model import ObservedModel
    from odmoe.training.predictor_training import Recall, Samples

HELD_OUT = 5
"""One answer in so many of each domain is held out."""


def train_predictor(
    model: Annotated[str, typer.Argument(help="Model directory, or org/name on the Hub")],
    prompts: Annotated[
        Path | None,
        option(
            help="File of prompts, one per line, or a folder with a NAME.txt for each domain (default: prompts of five "
            "domains)",
            metavar="PATH",
        ),
    ] = None,
    tokens: Annotated[
        int, option("-n", "--tokens", help="Maximum number of tokens per answer (default: 100)", metavar="N")
    ] = 100,
    steps: Annotated[int, option(help="Training steps per layer (default: 300)", metavar="N")] = 300,
    seed: Annotated[int, option(help="Random seed of the choice of held-out answers (default: 0)", metavar="N")] = 0,
    output: Annotated[
        Path | None,
        option("-o", "--output", help="File to write (default: MODEL/token_predictor.safetensors)", metavar="PATH"),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train the token-wise predictor of a model, for --predictor token-wise.

    Transformers answers the prompts. For each layer, a network learns which experts the next token will use.

    A fifth of each domain's answers is held out to measure recall. The whole model must fit in memory, in float32.
    """
    for name, value, least in (("--tokens", tokens, 2), ("--steps", steps, 1), ("--seed", seed, 0)):
        if not least <= value <= MAX_COUNT:
            raise ConfigError(f"{name} is {value}; allowed: {least}, {least + 1}, ... {MAX_COUNT}")
    texts = training_prompts() if prompts is None else _read_domains(prompts)
    run_train_predictor(model, texts, Training(tokens, steps, seed), output, as_json, Terminal(quiet, debug))


def _read_domains(path: Path) -> dict[str, list[str]]:
    """Domain -> its prompts, two or more. Raises ConfigError or PromptError."""
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"--prompts {path} is a folder without .txt files; give it one for each domain")
    found = {file.stem: read_prompts(None, file) for file in files}
    for file in files:
        if len(found[file.stem]) < 2:
            raise ConfigError(f"--prompts {file} has one prompt; give two or more, since one answer is held out")
    return found


@dataclass(frozen=True, slots=True)
class Training:
    """`tokens` of each answer; `steps` of each layer's training; `seed` draws which answers are held out."""

    tokens: int
    steps: int
    seed: int


def run_train_predictor(
    model: str,
    prompts: dict[str, list[str]],
    training: Training,
    output: Path | None,
    as_json: bool,
    terminal: Terminal,
) -> None:
    """Train, write and report. `prompts`: domain -> texts, two or more. `output`:
    MODEL/token_predictor.safetensors if it is None.

    Raises ConfigError, CheckpointError, DoesNotFitError or PromptError before the model is loaded.
    """
    from checkpoint.hub import find_model
    from checkpoint.prediction import token_predictor
    from odmoe.commands.shared.whole_model import check_memory, checked_config, load_whole
    from odmoe.text import encode, load_tokenizer
    from odmoe.training.observed_model import ObservedModel
    from odmoe.training.predictor_training import collect, fit, join_samples, mean_of, measure

    prepare_process(terminal.debug)
    path = find_model(model)
    config = checked_config(path)
    file = output or path / token_predictor.FILE
    check_writable("--output", str(file))
    context = check_memory(path.name, config, "float32").context_max
    if training.tokens > context - 2:
        raise ConfigError(f"--tokens is {training.tokens}; allowed: 2 to {context - 2}, by the model's context")
    prepare_libraries(Settings().threads_a_node)
    with terminal.status("loading the whole model with Transformers"):
        tokenizer = load_tokenizer(path, CorruptCheckpointError)
        ids = [
            (domain, encode(tokenizer, text, context - training.tokens))
            for domain, texts in prompts.items()
            for text in shuffle_texts(texts, training.seed)
        ]
        observed = ObservedModel(load_whole(path, "float32"))
    with terminal.progress() as progress:
        samples = collect(observed, [prompt for _, prompt in ids], training.tokens, progress)
        learned, held = _split([(domain, one) for (domain, _), one in zip(ids, samples, strict=True)])
        weights = {}
        for done, (layer, rows) in enumerate(learned.items(), 1):
            weights[layer] = fit(rows, observed.shape.top_k, training.steps)
            progress("training layers", done, len(learned))
    before = _weights_before(file, observed)
    unseen = join_samples(list(held.values()))
    found = Found(
        layers=measure(weights, before, unseen),
        domains={domain: mean_of(measure(weights, before, rows)) for domain, rows in held.items() if rows},
    )
    counts = {"learned": len(_first(learned).inputs), "held out": len(_first(unseen).inputs)}
    facts = _facts(path.name, prompts, training, counts, found)
    token_predictor.save(token_predictor.TokenPredictor(weights, facts), observed.gates, file)
    if file.parent.resolve() == path.resolve():
        sign(file)
    print(json.dumps(as_dict(file, facts, found)) if as_json else as_text(file, facts, found))


def _facts(
    model: str, prompts: dict[str, list[str]], training: Training, tokens: dict[str, int], found: Found
) -> dict[str, Any]:
    """What the file says of itself."""
    from wire.machine import processor_name

    return {
        "model": model,
        "answers": sum(map(len, prompts.values())),
        "domains": {domain: len(texts) for domain, texts in prompts.items()},
        "prompts": digest(prompts),
        "tokens": tokens,
        "steps": training.steps,
        "seed": training.seed,
        "accuracy by layer": {str(layer): one.after for layer, one in found.layers.items()},
        "accuracy by domain": {domain: one.after for domain, one in found.domains.items()},
        "accuracy": found.mean.after,
        "command": shlex.join(["odmoe", *sys.argv[1:]]),
        "machine": f"{processor_name()}, torch {version('torch')}, transformers {version('transformers')}",
        "when": time.strftime("%Y-%m-%d"),
    }


@dataclass(frozen=True, slots=True)
class Found:
    """Recall on the held-out answers, by layer, and of each domain over all layers."""

    layers: dict[int, Recall]
    domains: dict[str, Recall]

    @property
    def mean(self) -> Recall:
        from odmoe.training.predictor_training import mean_of

        return mean_of(self.layers)


def digest(prompts: dict[str, list[str]]) -> str:
    """Says whether a predictor was trained on these prompts, whatever their order."""
    texts = sorted(text for texts in prompts.values() for text in texts)
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def shuffle_texts(texts: list[str], seed: int) -> list[str]:
    """Those held out come first."""
    return random.Random(seed).sample(texts, len(texts))


def _split(
    samples: list[tuple[str, dict[int, Samples]]],
) -> tuple[dict[int, Samples], dict[str, dict[int, Samples]]]:
    """What is learned, of all domains together, and by domain what is held out. Raises PromptError if a side has
    no samples."""
    from odmoe.training.predictor_training import join_samples

    learned, held = [], {}
    for domain in dict.fromkeys(domain for domain, _ in samples):
        of = [one for name, one in samples if name == domain]
        count = max(1, len(of) // HELD_OUT)
        held[domain] = join_samples(of[:count]) if any(of[:count]) else {}
        learned += of[count:]
    return join_samples(learned), held


def _weights_before(file: Path, observed: ObservedModel) -> dict[int, Any] | None:
    """Of the file that will be replaced; None if there is none, or one of another model."""
    from checkpoint.prediction import token_predictor

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


def as_dict(file: Path, facts: dict[str, Any], found: Found) -> dict[str, Any]:
    """What --json prints."""
    layers = [{"layer": layer, **dataclasses.asdict(one)} for layer, one in found.layers.items()]
    domains = [{"domain": domain, **dataclasses.asdict(one)} for domain, one in found.domains.items()]
    return {"file": str(file), "bytes": file.stat().st_size, **facts, "recall": layers, "recall by domain": domains}


def as_text(file: Path, facts: dict[str, Any], found: Found) -> str:
    """Recall by layer and by domain, and where the file is."""
    tokens = facts["tokens"]
    rows = [(f"layer {layer}", one) for layer, one in found.layers.items()]
    rows += list(found.domains.items()) if len(found.domains) > 1 else []
    rows.append(("mean of layers", found.mean))
    width = max(len(name) for name, _ in rows)
    lines = [
        f"Token-wise predictor of {facts['model']}, {facts['answers']} answers: {tokens['learned']:,} tokens learned, "
        f"{tokens['held out']:,} held out",
        "Recall on the held-out answers, %:",
        f"  {'':{width}}   before    after   same experts again   chance",
        *(_line(f"{name:{width}}", one.before, one.after, one.same, one.chance) for name, one in rows),
        f"written: {file}, {file.stat().st_size:,} bytes",
    ]
    return "\n".join(lines)


def _line(name: str, *shares: float | None) -> str:
    before, after, same, chance = map(_percent, shares)
    return f"  {name} {before:>8} {after:>8} {same:>20} {chance:>8}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"

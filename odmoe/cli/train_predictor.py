"""`odmoe train-predictor`: weights for the token-wise predictor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from odmoe.cli.options import Debug, Json, Quiet
from odmoe.cli.prompts import read_prompts
from odmoe.training.domains import training_prompts
from scheduler.errors import ConfigError
from scheduler.limits import MAX_COUNT


def add_train_predictor(app: typer.Typer) -> None:
    """`odmoe train-predictor`."""
    app.command()(train_predictor)


def train_predictor(
    model: Annotated[str, typer.Argument(help="Model directory, or org/name on the Hub")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="File of prompts, one per line, or a folder with a NAME.txt for each domain (default: prompts of five "
            "domains)",
            show_default=False,
            metavar="PATH",
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(
            "-n", "--tokens", help="Maximum number of tokens per answer (default: 100)", show_default=False, metavar="N"
        ),
    ] = 100,
    steps: Annotated[
        int, typer.Option(help="Training steps per layer (default: 300)", show_default=False, metavar="N")
    ] = 300,
    seed: Annotated[
        int,
        typer.Option(
            help="Random seed of the choice of held-out answers (default: 0)", show_default=False, metavar="N"
        ),
    ] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="File to write (default: MODEL/token_predictor.safetensors)",
            show_default=False,
            metavar="PATH",
        ),
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
    from odmoe.commands.train_predictor import Training, run_train_predictor
    from odmoe.terminal import Terminal

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

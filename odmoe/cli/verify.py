"""`odmoe verify`: compare answers with those of Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from odmoe.cli.flags import SettingsCommand, with_settings
from odmoe.cli.options import Debug, Json, Quiet
from odmoe.cli.prompts import read_prompts
from odmoe.settings.settings import Settings
from odmoe.settings.sources import effective
from odmoe.settings.system_settings import CHOSEN
from odmoe.training.domains import training_prompts
from scheduler.errors import ConfigError

SAMPLES = 3
SETTINGS = (
    "system",
    *CHOSEN,
    "cluster",
    "workers",
    "slots",
    "device_memory",
    "memory",
    "shadow",
    "dtype",
    "experts",
    "loader",
    "device",
    "main_device",
    "shadow_device",
    "worker_device",
    "token_predictor",
    "predictor_learning_rate",
    "group_size",
    "align_token",
    "align_kv",
    "mini_batch",
    "threads",
    "store",
)
"""Settings of `generate` that could change an answer or the way it is computed."""


def add_verify(app: typer.Typer) -> None:
    """`odmoe verify`."""
    app.command(cls=SettingsCommand)(verify)


@with_settings(Settings, SETTINGS)
def verify(
    flags: dict[str, Any],
    model: Annotated[str, typer.Argument(help="Model directory, GGUF file or org/name on the Hub")],
    prompt: Annotated[str | None, typer.Argument(help=f"Prompt (default: {SAMPLES} sample prompts)")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="File of prompts, one per line, as text or JSON strings", show_default=False, metavar="PATH"),
    ] = None,
    tokens: Annotated[
        int, typer.Option("-n", "--tokens", help="Tokens of each answer (default: 32)", show_default=False, metavar="N")
    ] = 32,
    config: Annotated[
        str | None,
        typer.Option("--config", help="YAML file of settings, as for generate", show_default=False, metavar="PATH"),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Compare tokens and logits with those of Transformers on the same checkpoint.

    Both decode greedily. For Transformers the whole model must fit in memory.

    The exit code is 0 if tokens are equal, and logits up to rounding; otherwise 1.

    A system that is approximate by design is reported as such, with exit code 0.
    """
    from odmoe.terminal import Terminal

    settings = effective(flags | {"model": model}, config).settings
    if tokens < 1:
        raise ConfigError(f"--tokens is {tokens}; allowed: 1, 2, ...")
    if settings.joined:
        raise ConfigError(
            f"--cluster is {settings.cluster!r}; allowed for verify: embedded, local (the reference needs the whole "
            "model on this machine)"
        )
    given = prompt is not None or prompts is not None
    texts = read_prompts(prompt, prompts) if given else training_prompts()["problems"][:SAMPLES]
    from odmoe.commands.verify import run_verify

    if not run_verify(settings, texts, tokens, as_json, Terminal(quiet, debug)):
        raise typer.Exit(1)

"""`odmoe chaos`: faults on a running cluster, and whether its promises hold."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from odmoe.api.checks import check_start
from odmoe.clusters.process import prepare_process
from odmoe.commands.shared.flags import with_settings
from odmoe.commands.shared.options import Json, LibrariesDebug, Quiet, option, switch
from odmoe.settings.settings import Settings
from odmoe.settings.sources import effective
from odmoe.settings.table import flag
from odmoe.terminal import Output, Terminal
from scheduler.errors import ConfigError

if TYPE_CHECKING:
    from odmoe.api.model import Model, OpenedModel

FLAGS = ("model", "workers", "shadow", "threads", "system", "slots", "loader", "dtype", "worker_wait", "parallel")
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
VERDICT_S = 60.0
"""For the main host to undo a fault and say what it saw, after Ctrl-C."""
LENGTHS = (3, 12, 48, 160, 400)
"""Tokens of the prompts, as far as the context allows."""


@dataclass(frozen=True, slots=True)
class Chaos:
    """What is to be done, as it is sent to the main host of a cluster file."""

    seconds: float
    seed: int
    faults: str | None
    clients: int
    requests: int | None
    tokens: int
    as_json: bool
    quiet: bool
    debug: bool


@with_settings(Settings, FLAGS, chooses=False)
def chaos(
    flags: dict[str, Any],
    file: Annotated[Path | None, typer.Argument(help="Cluster file (default: a local cluster for -m MODEL)")] = None,
    duration: Annotated[str, option("--for", help="How long: 90s, 10m, 2h (default: 2m)", metavar="TIME")] = "2m",
    seed: Annotated[int, option(help="Draws the same faults again (default: 0)", metavar="N")] = 0,
    faults: Annotated[
        str | None, option(help="Only these, by name; none: load alone (default: all)", metavar="A,B")
    ] = None,
    clients: Annotated[int, option(help="Requests at once (default: 2)", metavar="N", min=1)] = 2,
    requests: Annotated[int | None, option(help="End after so many requests", metavar="N", min=1)] = None,
    tokens: Annotated[int, option("-n", help="Most tokens of an answer (default: 64)", metavar="N", min=2)] = 64,
    yes: Annotated[bool, switch("-y", "--yes", help="Do not ask")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: LibrariesDebug = False,
) -> None:
    """Kill, freeze and slow the nodes of a running cluster, and see what clients get.

    With a cluster file it also cuts links and damages stores, for seconds.

    Every answer must have the tokens that it has without faults, or end with
    an error that has a name. The exit code is 1 if one does not, or if a node
    does not come back. Ctrl-C ends it with a verdict on what was seen until
    then. docs/running.md lists the faults.
    """
    asked = Chaos(seconds_of(duration), seed, faults, clients, requests, tokens, as_json, quiet, debug)
    settings = effective(flags | {"cluster": str(file) if file else "local"}, None).settings
    check_start(settings, flag, "command")
    if not yes:
        spoilt = f"the nodes of {file}, cut their links and damage their stores for seconds"
        nodes = spoilt if file else f"those of a local cluster of {settings.model}"
        _ask(f"kill, freeze and slow {nodes}", duration)
    if settings.has_cluster_file:
        from odmoe.commands.over_ssh.generate import ask_head

        request = {"do": "chaos", "chaos": dataclasses.asdict(asked)}
        raise typer.Exit(ask_head(settings, request, Output(as_json, quiet, debug), VERDICT_S))
    if not run_chaos(settings, asked):
        raise typer.Exit(1)


def seconds_of(text: str) -> float:
    """`90s`, `10m`, `2h`, or a number of seconds. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not found or float(found[1]) == 0:
        raise ConfigError(f"--for is {text!r}; allowed: a time such as 90s, 10m or 2h")
    return float(found[1]) * UNITS[found[2]]


def _ask(what: str, duration: str) -> None:
    """Raises ConfigError if nobody can be asked, typer.Exit at no."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on; give -y to disturb the cluster without a question")
    if not typer.confirm(f"{what} for {duration}?", err=True):
        raise typer.Exit(1)


def run_chaos(settings: Settings, asked: Chaos) -> bool:
    """Disturb the cluster, and print what was found, also after Ctrl-C. Returns whether all held. Raises ODMoEError."""
    prepare_process(asked.debug)
    from odmoe.api.checks import check_early
    from odmoe.api.model import start_model
    from odmoe.commands.texts.chaos_text import as_text

    check_early(settings)
    terminal = Terminal(asked.quiet, asked.debug)
    with start_model(settings, terminal) as model:
        verdict = _disturb(model, asked, terminal)
        print(json.dumps(dataclasses.asdict(verdict)) if asked.as_json else as_text(verdict), flush=True)
    if verdict.interrupted:
        raise KeyboardInterrupt
    return not verdict.violations


def _disturb(model: Model, asked: Chaos, terminal: Terminal) -> Any:
    from odmoe.chaos.faults import chosen_faults
    from odmoe.chaos.run import ClusterNodes, Disturbance, Plan, ask_cluster
    from odmoe.on_ray.victims import NodeProcesses

    cluster: Any = model.cluster
    served = cluster.serves()
    if served.inexact:
        raise ConfigError("the cluster's answers depend on its caches by design; serve it with an exact system")
    lasts = served.uses_existing_ray
    processes = NodeProcesses(cluster, not lasts)
    able = ["main"] + ["shadow"] * served.has_shadow + ["restarts"] * lasts + ["hosts"] * processes.can_spoil()
    plan = Plan(
        asked.seconds,
        chosen_faults(asked.faults, able),
        asked.seed,
        asked.clients,
        asked.requests,
        served.worker_wait,
        served.parallel,
    )
    nodes = ClusterNodes(cluster, processes)
    prompts, wrong = prompts_of(model.opened, asked.tokens), [5] * (model.opened.context + 1)
    with terminal.status() as say:
        return Disturbance(nodes, ask_cluster(cluster), prompts, asked.tokens, wrong).run(plan, say)


def prompts_of(opened: OpenedModel, tokens: int) -> list[list[int]]:
    """Token ids of prompts of mixed lengths. Raises ConfigError if no answer fits the context."""
    from odmoe.training.domains import training_prompts

    room = opened.context - tokens
    if room < LENGTHS[0]:
        raise ConfigError(f"-n is {tokens}; allowed: 2 to {opened.context - LENGTHS[0]}, for the model's context")
    text = "\n".join(text for texts in training_prompts().values() for text in texts[:10])[:20_000]
    ids = opened.encode(text, most=1 << 20)
    lengths = [length for length in LENGTHS if length <= room]
    return [ids[100 * number : 100 * number + length] for number, length in enumerate(lengths)]

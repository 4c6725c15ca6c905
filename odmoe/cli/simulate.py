"""`odmoe simulate`: a system on a virtual clock, by the same scheduler as a real run; or a real run's log once more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from scheduler.errors import ConfigError
from scheduler.policies.choices import PREFILLS
from scheduler.policies.registry import PLACEMENTS, PRECISIONS, PREDICTORS, RESIDENCIES, ROUTERS
from scheduler.policies.systems import SYSTEMS
from scheduler.simulation.scenario import PROFILE, RECALL

_WORLD = ("profile", "system", "tokens", "prompt_tokens", "recall", "workers", "slots", "group_size", "align_token",
          "align_kv", "mini_batch", "layers", "experts", "top_k", "predictor", "residency", "router", "prefill",
          "placement", "precision", "alpha", "prefetch", "trace", "seed")  # fmt: skip
"""Flags that a replay has no use for."""


def add_simulate(app: typer.Typer) -> None:
    """`odmoe simulate`."""
    app.command()(simulate)


def _option(about: str, **more: Any) -> Any:
    return typer.Option(help=about, show_default=False, **more)


def simulate(
    profile: Annotated[str | None, _option(f"Whose timings: a name or a file (default: {PROFILE}).")] = None,
    system: Annotated[str | None, _option(f"What it chooses: {', '.join(SYSTEMS)} (default: od-moe).")] = None,
    tokens: Annotated[int | None, _option("Tokens of the answer, the first included (default: 64).")] = None,
    prompt_tokens: Annotated[int | None, _option("Tokens of the prompt (default: 16).")] = None,
    recall: Annotated[
        float | None, _option(f"Share of experts that the shadow names rightly, 0 to 1 (default: {RECALL}).")
    ] = None,
    routes: Annotated[Path | None, _option("Take routes and predictions from a recording.")] = None,
    replay: Annotated[Path | None, _option("Tell the scheduler what a recording says, and compare.")] = None,
    workers: Annotated[int | None, _option("How many worker nodes; the profile's when not given.")] = None,
    slots: Annotated[int | None, _option("Experts that a worker has room for; 1, or as many as must stay.")] = None,
    group_size: Annotated[
        int | None, _option("Workers that serve a layer together; the profile's, or --top-k.")
    ] = None,
    align_token: Annotated[int | None, _option("Align the shadow's token every N tokens (default: 1).")] = None,
    align_kv: Annotated[int | None, _option("Align the shadow's KV cache every N tokens (default: 1).")] = None,
    mini_batch: Annotated[
        int | None, _option("Most rows an expert computes at once in prefill; as for generate when not given.")
    ] = None,
    layers: Annotated[int | None, _option("MoE layers of the model; the profile's when not given.")] = None,
    experts: Annotated[int | None, _option("Experts of a layer; the profile's when not given.")] = None,
    top_k: Annotated[int | None, _option("Experts a token; the profile's when not given.")] = None,
    predictor: Annotated[str | None, _option(f"Who predicts: {', '.join(PREDICTORS)}; else the system's.")] = None,
    residency: Annotated[str | None, _option(f"Who stays: {', '.join(RESIDENCIES)}; else the system's.")] = None,
    router: Annotated[str | None, _option(f"Who computes: {', '.join(ROUTERS)}; else the system's.")] = None,
    prefill: Annotated[str | None, _option(f"As for generate: {', '.join(PREFILLS)} (default: ahead).")] = None,
    placement: Annotated[
        str | None, _option(f"Where experts are computed: {', '.join(PLACEMENTS)}; else the system's.")
    ] = None,
    precision: Annotated[
        str | None, _option(f"In which form they are loaded: {', '.join(PRECISIONS)}; else the system's.")
    ] = None,
    alpha: Annotated[
        float | None, _option("How much a router may change, as for generate, 0 to 1; else the system's.")
    ] = None,
    prefetch: Annotated[
        int | None, _option("Most experts of a layer that a predictor brings; else the system's.")
    ] = None,
    seed: Annotated[int | None, _option("Of the routes and the shadow's mistakes (default: 0).")] = None,
    trace: Annotated[Path | None, _option("Write what every node did, for ui.perfetto.dev.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Say how fast a system would answer on a profile's machines and where the time goes; or replay a recording."""
    given = {name: value for name, value in locals().items() if name in _WORLD and value is not None}
    from odmoe.commands.simulate import GivenFlags, run_replay, run_simulation
    from odmoe.terminal import Terminal

    if replay is not None:
        if routes is not None or given:
            other = "routes" if routes is not None else next(iter(given))
            raise ConfigError(f"--replay is given with --{other.replace('_', '-')}; a replay decides what was decided")
        if not run_replay(replay, as_json):
            raise typer.Exit(1)
        return
    run_simulation(GivenFlags(given, routes), as_json, Terminal(quiet, debug))

"""`odmoe simulate`: run a system's scheduler on a virtual clock, or replay a recording."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from odmoe.commands.shared.flags import with_settings
from odmoe.commands.shared.options import Json, PanelDebug, PanelQuiet, switch
from odmoe.settings.simulate_settings import SimulateSettings
from odmoe.settings.sweep_settings import SweepSettings
from odmoe.settings.table import flag
from scheduler.errors import ConfigError

Validate = Annotated[
    bool,
    switch("--validate", help="Check the scheduler's books after each event of a replay", rich_help_panel="Workload"),
]


@with_settings(SimulateSettings, beside=SweepSettings)
def simulate(
    flags: dict[str, Any],
    validate: Validate = False,
    as_json: Json = False,
    quiet: PanelQuiet = False,
    debug: PanelDebug = False,
) -> None:
    """Simulate a system, compare several, or replay a recording.

    Shows the speed and where the time goes. odmoe systems lists systems and policies.
    """
    asked = SweepSettings(**{name: flags.pop(name) for name in SweepSettings.model_fields if name in flags})
    settings = SimulateSettings(**flags)
    if asked.model_fields_set:
        _sweep(settings, asked, as_json, quiet, debug)
        return
    if settings.replay is None:
        if validate:
            raise ConfigError("--validate is given without --replay; record a run with --record and replay that")
        from odmoe.api.simulating import run_simulation
        from odmoe.commands.texts.simulate_text import show
        from odmoe.terminal import Terminal

        found = run_simulation(settings, Terminal(quiet, debug).progress).as_dict()
        if as_json:
            print(json.dumps(found))
        else:
            show(found)
        return
    for name in SimulateSettings.names():
        if name not in ("replay", "policy_file") and settings.is_given(name):
            raise ConfigError(f"--replay is given with {flag(name)}; a replay has the recording's own settings")
    if not _replay(settings.replay, validate, as_json):
        raise typer.Exit(1)


def _sweep(settings: SimulateSettings, asked: SweepSettings, as_json: bool, quiet: bool, debug: bool) -> None:
    """Raises ConfigError."""
    for name in ("replay", "trace", "slots", "parallel", "requests"):
        if settings.is_given(name):
            raise ConfigError(
                f"{flag(name)} is given with a comparison of systems, which does not read it; leave it out"
            )
    from odmoe.api.checks import check_writable
    from odmoe.api.simulation import sweep
    from odmoe.commands.texts.sweep_text import show
    from odmoe.simulation_pool import simulation_pool
    from odmoe.terminal import Terminal

    if asked.output is not None:
        check_writable("--output", asked.output)
    profile, _ = sweep.axes_of(settings, asked)  # before processes begin
    with simulation_pool() as each, Terminal(quiet, debug).progress() as move:
        points = sweep.sweep(settings, asked, each, lambda done, total: move("simulations", done, total))
    if asked.output is not None:
        sweep.write(Path(asked.output), points, settings)
    if as_json:
        print(json.dumps(sweep.as_json(points, settings)))
    else:
        show(points, profile.name)


def _replay(file: str, validate: bool, as_json: bool) -> bool:
    """Whether the scheduler makes the recorded decisions, and its books agree. Raises ConfigError."""
    from odmoe.api.simulating import replay

    done = replay(file, validate)
    if as_json:
        facts = {"events": done.events, "commands": done.commands, "difference": done.difference}
        print(json.dumps({"recording": file, **facts, "identical": done.difference is None}))
    else:
        print(f"{file}: {done}")
    return done.difference is None

"""`odmoe simulate`: run a system's scheduler on a virtual clock, or replay a recording."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from odmoe.commands.shared.flags import with_settings
from odmoe.commands.shared.options import Json, PanelDebug, PanelQuiet
from odmoe.settings.simulate_settings import SimulateSettings
from odmoe.settings.table import flag
from scheduler.errors import ConfigError

Validate = Annotated[
    bool,
    typer.Option(
        "--validate",
        help="Check the scheduler's books after each event of a replay",
        rich_help_panel="Workload",
        metavar="",
    ),
]


@with_settings(SimulateSettings)
def simulate(
    flags: dict[str, Any],
    validate: Validate = False,
    as_json: Json = False,
    quiet: PanelQuiet = False,
    debug: PanelDebug = False,
) -> None:
    """Simulate a system, or replay a recording.

    Shows the speed and where the time goes. odmoe systems lists systems and policies.
    """
    settings = SimulateSettings(**flags)
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

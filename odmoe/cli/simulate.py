"""`odmoe simulate`: run a system's scheduler on a virtual clock, or replay a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from odmoe.cli.flags import SettingsCommand, with_settings
from odmoe.cli.options import Json, PanelDebug, PanelQuiet
from odmoe.settings.simulate_settings import SimulateSettings
from odmoe.settings.table import flag
from scheduler.errors import ConfigError


def add_simulate(app: typer.Typer) -> None:
    """`odmoe simulate`."""
    app.command(cls=SettingsCommand)(with_settings(SimulateSettings)(simulate))


def simulate(
    flags: dict[str, Any],
    as_json: Json = False,
    quiet: PanelQuiet = False,
    debug: PanelDebug = False,
) -> None:
    """Simulate a system, or replay a recording.

    Shows the speed and where the time goes. odmoe systems lists systems and policies.
    """
    settings = SimulateSettings(**flags)
    from odmoe.commands.simulate import run_replay, run_simulation
    from odmoe.terminal import Terminal

    if settings.replay is None:
        run_simulation(settings, as_json, Terminal(quiet, debug))
        return
    for name in SimulateSettings.names():
        if name != "replay" and settings.given(name):
            raise ConfigError(f"--replay is given with {flag(name)}; a replay has the recording's own settings")
    if not run_replay(Path(settings.replay), as_json):
        raise typer.Exit(1)

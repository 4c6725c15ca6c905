"""`odmoe plan`: speed and memory of a model on machines that need not exist yet."""

from __future__ import annotations

import json
from typing import Any

import typer

from odmoe.cli.flags import SettingsCommand, with_settings
from odmoe.cli.options import Json, PanelDebug, PanelQuiet
from odmoe.settings.plan_settings import PlanSettings


def add_plan(app: typer.Typer) -> None:
    """`odmoe plan`."""
    app.command(cls=SettingsCommand)(with_settings(PlanSettings)(plan))


def plan(
    flags: dict[str, Any],
    as_json: Json = False,
    quiet: PanelQuiet = False,
    debug: PanelDebug = False,
) -> None:
    """Plan a cluster for a model.

    Shows whether loads keep up, tokens/s, memory, and which change would help most.

    The exit code is 1 if --worker-memory is too small.
    """
    settings = PlanSettings(**flags)
    settings.check_together()
    from odmoe.api.planning import planned, report_of
    from odmoe.clusters.process import prepare_process
    from odmoe.commands.plan_text import as_text
    from odmoe.terminal import Terminal

    prepare_process(debug)
    result = planned(settings, Terminal(quiet, debug).status)
    print(json.dumps(report_of(result).as_dict()) if as_json else as_text(result))

"""`odmoe serve`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from odmoe.cli.flags import SettingsCommand, with_settings
from odmoe.cli.options import LibrariesDebug
from odmoe.settings.serve_settings import SERVED, ServeSettings
from odmoe.settings.settings import Settings
from odmoe.settings.sources import effective
from odmoe.settings.table import flag


def add_serve(app: typer.Typer) -> None:
    app.command(cls=SettingsCommand)(with_settings(Settings, SERVED, ServeSettings)(serve))


def serve(
    flags: dict[str, Any],
    config: Annotated[
        str | None,
        typer.Option(
            "--config", help="YAML file of settings, as for generate", rich_help_panel="Cluster", metavar="PATH"
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Show no progress and no requests", metavar="")] = False,
    debug: LibrariesDebug = False,
) -> None:
    """Serve a model by the OpenAI API.

    --cluster is as for odmoe generate. Sampling settings apply to requests
    that do not have them. Ctrl-C or SIGTERM ends it when its answers are done.
    """
    own = ServeSettings(**{name: value for name, value in flags.items() if name in ServeSettings.model_fields})
    keys = own.keys()
    settings = effective(
        {name: value for name, value in flags.items() if name in Settings.model_fields}, config
    ).settings
    from odmoe.api.checks import check_start

    check_start(settings, flag, "command")
    from odmoe.terminal import Output

    output = Output(False, quiet, debug)
    if settings.cluster_file:
        from odmoe.commands.serve_remote import serve_there

        raise typer.Exit(serve_there(settings, own, keys, output))
    from odmoe.serve.start import run_serve

    raise typer.Exit(run_serve(settings, own, keys, output))

"""`odmoe serve`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from odmoe.commands.shared.flags import with_settings
from odmoe.commands.shared.options import ConfigAsForGenerate, LibrariesDebug, switch
from odmoe.settings.derived import SERVE_FLAGS
from odmoe.settings.serve_settings import ServeSettings
from odmoe.settings.settings import Settings
from odmoe.settings.sources import effective
from odmoe.settings.table import flag


@with_settings(Settings, SERVE_FLAGS, ServeSettings)
def serve(
    flags: dict[str, Any],
    config: ConfigAsForGenerate = None,
    quiet: Annotated[bool, switch("-q", "--quiet", help="Show no progress and no requests")] = False,
    debug: LibrariesDebug = False,
) -> None:
    """Serve a model by the OpenAI API.

    --cluster is as for odmoe generate. Sampling settings apply to requests
    that do not have them. Ctrl-C or SIGTERM ends it when its answers are done.
    """
    own = ServeSettings(**{name: value for name, value in flags.items() if name in ServeSettings.model_fields})
    keys = own.keys()
    if own.log_format == "json":
        from odmoe.json_log import use_json_log

        use_json_log()
    settings = effective(
        {name: value for name, value in flags.items() if name in Settings.model_fields}, config
    ).settings.keeping_prompts()
    from odmoe.api.checks import check_start

    check_start(settings, flag, "command")
    from odmoe.terminal import Output

    output = Output(False, quiet, debug)
    if settings.has_cluster_file:
        from odmoe.commands.over_ssh.serve import serve_there

        raise typer.Exit(serve_there(settings, own, keys, output))
    from odmoe.serve.key_ring import KeyRing
    from odmoe.serve.start import run_serve

    raise typer.Exit(run_serve(settings, own, KeyRing(keys), output))

"""`odmoe up`: start the cluster of a cluster file."""

from __future__ import annotations

from typing import Annotated, Any

from odmoe.commands.shared.flags import with_settings
from odmoe.commands.shared.options import ConfigAsForGenerate, ErrorsOnly, File, LibrariesDebug, option, switch
from odmoe.settings.settings import Settings
from odmoe.settings.sources import effective
from scheduler.errors import ConfigError

MAX_TIMEOUT_S = 1e6


@with_settings(Settings, chooses=False)
def up(
    flags: dict[str, Any],
    file: File,
    timeout: Annotated[
        float,
        option(
            help="Seconds to wait for Ray and the nodes (default: 300)", min=1, rich_help_panel="Cluster", metavar="X"
        ),
    ] = 300.0,
    config: ConfigAsForGenerate = None,
    take_over: Annotated[
        bool,
        switch(
            "--take-over",
            help="Also use hosts of other clusters, and end what these run there",
            rich_help_panel="Cluster",
        ),
    ] = False,
    quiet: ErrorsOnly = False,
    debug: LibrariesDebug = False,
) -> None:
    """Start the cluster that a cluster file describes.

    Copies keys, code and expert store to every machine, then starts Ray and a node there.
    """
    if timeout > MAX_TIMEOUT_S:
        raise ConfigError(f"--timeout is {timeout:g}; allowed: 1 to {MAX_TIMEOUT_S:g}")
    from odmoe.machines.up import up as bring_up
    from odmoe.terminal import Terminal

    settings = effective({**flags, "cluster": str(file)}, config, chooses=False).settings
    bring_up(file, settings, Terminal(quiet, debug), timeout, take_over)

"""The commands for the machines of a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from odmoe.cli.flags import SettingsCommand, with_settings
from odmoe.cli.options import LibrariesDebug
from odmoe.settings.settings import Settings
from odmoe.settings.sources import effective
from scheduler.errors import ConfigError

MAX_TIMEOUT_S = 1e6
File = Annotated[Path, typer.Argument(help="Cluster file, such as cluster.yaml")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print errors only", metavar="")]


def add_commands(app: typer.Typer) -> None:
    """`odmoe certs, up, status, down, host-stores`."""
    app.command()(certs)
    app.command(cls=SettingsCommand)(with_settings(Settings)(up))
    app.command()(status)
    app.command()(down)
    app.command()(host_stores)


def up(
    flags: dict[str, Any],
    file: File,
    timeout: Annotated[
        float,
        typer.Option(
            help="Seconds to wait for Ray and the nodes (default: 300)",
            show_default=False,
            min=1,
            rich_help_panel="Cluster",
            metavar="X",
        ),
    ] = 300.0,
    config: Annotated[
        str | None,
        typer.Option(
            "--config", help="YAML file of settings, as for generate", rich_help_panel="Cluster", metavar="PATH"
        ),
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Also use hosts of other clusters, and end what these run there",
            rich_help_panel="Cluster",
            metavar="",
        ),
    ] = False,
    quiet: Quiet = False,
    debug: LibrariesDebug = False,
) -> None:
    """Start the cluster that a cluster file describes.

    Copies keys, code and expert store to every machine, then starts Ray and a node there.
    """
    if timeout > MAX_TIMEOUT_S:
        raise ConfigError(f"--timeout is {timeout:g}; allowed: 1 to {MAX_TIMEOUT_S:g}")
    from odmoe.machines.up import up as bring_up
    from odmoe.terminal import Terminal

    settings = effective({**flags, "cluster": str(file)}, config).settings
    bring_up(file, settings, Terminal(quiet, debug), timeout, take_over)


def status(
    file: File,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until Ctrl-C", metavar="")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object (with --watch, one per line)", metavar="")
    ] = False,
) -> None:
    """Show the state of every machine and its node.

    The exit code is 1 unless all nodes are ready.
    """
    from odmoe.machines.status import status as show

    if not show(file, watch, as_json):
        raise typer.Exit(1)


def down(file: File, quiet: Quiet = False, debug: LibrariesDebug = False) -> None:
    """Stop nodes and Ray on every machine of a cluster file."""
    from odmoe.machines.down import down as take_down
    from odmoe.terminal import Terminal

    take_down(file, Terminal(quiet, debug))


def host_stores(
    file: File,
    remove: Annotated[
        list[str] | None,
        typer.Option(
            help="A store to remove from every machine; repeatable. One in use stays",
            show_default=False,
            metavar="NAME",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object", metavar="")] = False,
) -> None:
    """List the expert stores on the machines of a cluster file, with their sizes, or remove some."""
    from odmoe.machines.host_stores import list_stores, remove_stores

    if remove:
        remove_stores(file, remove, as_json)
    else:
        list_stores(file, as_json)


def certs(
    file: Annotated[Path | None, typer.Argument(help="Cluster file, in place of --host")] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="A host, as NAME=ADDRESS[=ROLE]; repeatable", show_default=False, metavar="TEXT"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output directory (default: ~/.config/odmoe/clusters/NAME)", show_default=False, metavar="PATH"
        ),
    ] = None,
    days: Annotated[
        int,
        typer.Option(
            help="Days for which a host's certificate is valid (default: 825)", show_default=False, metavar="N"
        ),
    ] = 825,
    renew: Annotated[
        bool, typer.Option("--renew", help="Renew the hosts' certificates, not the CA", metavar="")
    ] = False,
) -> None:
    """Create certificates for the hosts of a cluster.

    If there is no certificate authority yet, it is created, too.
    """
    from odmoe.machines.certs import run_certs
    from odmoe.terminal import Terminal

    run_certs(file, host or [], out, days, renew, Terminal())

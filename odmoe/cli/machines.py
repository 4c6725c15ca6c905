"""The commands that are about the machines of a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from odmoe.cli.flags import with_settings
from odmoe.settings.sources import effective

File = Annotated[Path, typer.Argument(help="The cluster file, such as the project's cluster.yaml.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error came from, and what the libraries say.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Say nothing that is no error.")]


def add_commands(app: typer.Typer) -> None:
    """`odmoe certs, up, status, down`."""
    app.command()(certs)
    app.command()(with_settings(up))
    app.command()(status)
    app.command()(down)


def up(
    flags: dict[str, Any],
    file: File,
    timeout: Annotated[float, typer.Option(help="Most seconds for Ray and the nodes to come up.", min=1)] = 300.0,
    config: Annotated[str | None, typer.Option("--config", help="Settings as YAML, as for generate.")] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Bring up the machines of a cluster file: keys, store, code, Ray, and a node on each, ready to answer."""
    from odmoe.machines.up import up as bring_up
    from odmoe.terminal import Terminal

    settings = effective({**flags, "cluster": str(file)}, config).settings
    bring_up(file, settings, Terminal(quiet, debug), timeout)


def status(
    file: File,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object (with --watch one a line).")] = False,
) -> None:
    """Show every machine of a cluster file and how its node is. Exit code 1 unless all are ready."""
    from odmoe.machines.status import status as show

    if not show(file, watch, as_json):
        raise typer.Exit(1)


def down(file: File, quiet: Quiet = False, debug: Debug = False) -> None:
    """End the nodes and Ray on every machine of a cluster file, and see to it that nothing is left."""
    from odmoe.machines.down import down as take_down
    from odmoe.terminal import Terminal

    take_down(file, Terminal(quiet, debug))


def certs(
    file: Annotated[Path | None, typer.Argument(help="A cluster file; or give --host.")] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="NAME=ADDRESS; may be given several times.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to; ~/.config/odmoe/clusters/NAME when not given.", show_default=False)
    ] = None,
    days: Annotated[int, typer.Option(help="How long a host's certificate is valid.")] = 825,
    renew: Annotated[bool, typer.Option("--renew", help="Make the hosts' certificates anew; never the CA.")] = False,
) -> None:
    """Make a cluster's certificate authority, where there is none, and a certificate for each host."""
    from odmoe.machines.certs import run_certs
    from odmoe.terminal import Terminal

    run_certs(file, host or [], out, days, renew, Terminal())

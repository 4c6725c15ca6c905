"""`odmoe certs`: certificates for the hosts of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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

"""`odmoe certs`: certificates for the hosts of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from odmoe.commands.shared.options import option, switch


def certs(
    file: Annotated[Path | None, typer.Argument(help="Cluster file, in place of --host")] = None,
    host: Annotated[list[str] | None, option(help="A host, as NAME=ADDRESS[=ROLE]; repeatable", metavar="TEXT")] = None,
    out: Annotated[
        Path | None, option(help="Output directory (default: ~/.config/odmoe/clusters/NAME)", metavar="PATH")
    ] = None,
    days: Annotated[int, option(help="Days for which a host's certificate is valid (default: 825)", metavar="N")] = 825,
    renew: Annotated[bool, switch("--renew", help="Renew the hosts' certificates, not the CA")] = False,
) -> None:
    """Create certificates for the hosts of a cluster.

    If there is no certificate authority yet, it is created, too.
    """
    from odmoe.machines.certs import run_certs
    from odmoe.terminal import Terminal

    run_certs(file, host or [], out, days, renew, Terminal())

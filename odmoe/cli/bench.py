"""`odmoe bench`: disk, GPU and link of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from odmoe.cli.options import Debug, Json, Quiet
from odmoe.settings.table import shown
from odmoe.settings.units import parse_address, parse_bytes
from scheduler.errors import ConfigError
from scheduler.types import PAGE

if TYPE_CHECKING:
    from wire.rpc.tls import Identity


def add_bench(app: typer.Typer) -> None:
    """`odmoe bench`."""
    app.command()(bench)


def bench(
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Directory on the disk to measure (default: the cache directory)", show_default=False, metavar="PATH"
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="Read this expert store instead of a new file", show_default=False, metavar="PATH"),
    ] = None,
    expert_bytes: Annotated[
        str | None,
        typer.Option(help="Size of an expert in the new file (default: 20MiB)", show_default=False, metavar="TEXT"),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of a host that runs bench --serve", show_default=False, metavar="TEXT"),
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(
            help="ADDRESS:PORT to listen on, for bench --link on another host", show_default=False, metavar="TEXT"
        ),
    ] = None,
    tls: Annotated[
        Path | None,
        typer.Option(
            help="Directory of this host's certificates, for --link and --serve (odmoe certs)",
            show_default=False,
            metavar="PATH",
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure disk, GPU and network of this machine for odmoe plan.

    It loads whole experts past the page cache, as a worker does, from disk and to a GPU.

    The network is measured with a gRPC stream, over loopback unless --link names another host.
    """
    size = None if expert_bytes is None else _size(expert_bytes)
    if serve is not None and link is not None:
        raise ConfigError("--serve and --link are both given; run one of them on each host")
    if store is not None and folder is not None:
        raise ConfigError("--store and --folder are both given; give one of them")
    if tls is not None and serve is None and link is None:
        raise ConfigError("--tls is given without --link or --serve, and nothing reads it; leave it out")
    for name, value in (("--folder", folder), ("--store", store), ("--expert-bytes", expert_bytes)):
        if serve is not None and value is not None:
            raise ConfigError(f"--serve and {name} are both given; --serve measures no disk, so leave {name} out")
    secret, identity = _credentials(tls)
    if serve is not None:
        from odmoe.bench.link import SERVE_S
        from odmoe.bench.link import serve as serve_link

        host, port = _address("--serve", serve, 0)
        duration = f"for {SERVE_S / 60:g} minutes or until Ctrl-C"
        serve_link(
            host, port, secret, identity, lambda at: print(f"odmoe bench --link to here, {duration}: {at}", flush=True)
        )
        return
    if link is not None:
        _address("--link", link, 1)
    from odmoe.commands.bench import run_bench
    from odmoe.terminal import Terminal

    run_bench(folder, store, size, link, secret, identity, as_json, Terminal(quiet, debug))


def _size(text: str) -> int:
    """Rounded down to whole pages of 4096 bytes, which O_DIRECT needs."""
    try:
        pages = parse_bytes(text) // PAGE
    except ValueError:
        pages = 0
    if not 1 <= pages <= 1 << 18:
        raise ConfigError(f"--expert-bytes is {shown(text)}; allowed: 4KiB to 1GiB")
    return pages * PAGE


def _address(name: str, text: str, least: int) -> tuple[str, int]:
    try:
        return parse_address(text, least)
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}; allowed: {error}") from None


def _credentials(tls: Path | None) -> tuple[str | None, Identity | None]:
    if tls is None:
        return None, None
    from odmoe.clusters.credentials import credentials
    from odmoe.settings.settings import Settings

    secret, identity = credentials(Settings(tls=str(tls)))
    return secret, identity.whatever_role() if identity else None

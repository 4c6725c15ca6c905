"""`odmoe pull`: a model onto this machine."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from odmoe.commands.shared.options import Debug, Json, Quiet, option
from odmoe.terminal import Output, Terminal, megabytes

if TYPE_CHECKING:
    from odmoe.pull.pull import Pulled


def pull(
    name: Annotated[str, typer.Argument(help="org/name, org/name:Q4_K_M for one GGUF quantisation, or demo")],
    revision: Annotated[str | None, option(help="Branch, tag or commit", metavar="REVISION")] = None,
    to: Annotated[Path | None, option(help="Folder to put it in (default: the Hub cache)", metavar="DIR")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Fetch a model from the Hub: only what is needed, resumed and checked.

    odmoe pull demo copies the demo model that came with OD-MoE. HF_HOME,
    HF_ENDPOINT and HF_TOKEN apply.
    """
    run_pull(name, revision, to, Output(as_json, quiet, debug))


def run_pull(name: str, revision: str | None, to: Path | None, output: Output) -> None:
    """Raises ConfigError, CheckpointError, StoreWriteError."""
    from odmoe.pull.pull import copy_shipped, fetch, list_wanted

    terminal = Terminal(output.quiet, output.debug)
    folder, began = None if to is None else to.expanduser(), time.monotonic()

    def on_plan(files: int, size: int) -> None:
        terminal.console.print(f"{name}: {files} files, {megabytes(size)}", markup=False, soft_wrap=True)

    with terminal.progress(f"asking for {name}", lines=False) as progress:
        if "/" in name:
            wanted, quantisation = list_wanted(name, revision, folder)
            pulled = fetch(wanted, quantisation, on_plan, progress)
        else:
            pulled = copy_shipped(name, folder, progress)
    _show(pulled, time.monotonic() - began, output, terminal)


def _show(pulled: Pulled, took_s: float, output: Output, terminal: Terminal) -> None:
    if output.json:
        print(json.dumps({**asdict(pulled), "path": str(pulled.path)}))
        return
    rate = f", {megabytes(pulled.fetched_bytes)} of it now, {megabytes(int(pulled.fetched_bytes / took_s))}/s"
    line = f"{pulled.name}: {megabytes(pulled.bytes)} in {took_s:.1f} s{rate if pulled.fetched_bytes else ''}, checked"
    terminal.console.print(line, markup=False, soft_wrap=True)
    print(pulled.path)

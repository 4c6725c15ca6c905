"""`odmoe rm`: a checkpoint or a store leaves this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from odmoe.commands.shared.options import Json, switch
from odmoe.terminal import megabytes
from scheduler.errors import ConfigError, StoreWriteError
from scheduler.unknown_names import nearest

if TYPE_CHECKING:
    from odmoe.inventory.entry import Entry


def rm(
    name: Annotated[str, typer.Argument(help="As odmoe models lists it")],
    dry_run: Annotated[bool, switch("--dry-run", help="Only say what would go")] = False,
    yes: Annotated[bool, switch("-y", "--yes", help="Do not ask")] = False,
    as_json: Json = False,
) -> None:
    """Remove a checkpoint or a store from this machine.

    It asks first. Nothing goes that a process uses, that came with OD-MoE, or
    that is outside of the models folder, the Hub cache and the stores.
    """
    entry = _find(name)
    _check_unused(entry)
    line = f"{entry.kind} {entry.name}, {megabytes(entry.bytes)}, {entry.path}"
    if not dry_run and not yes:
        _ask(line)
        _check_unused(entry)  # it may have been opened while the question stood
    if not dry_run:
        _remove(entry)
    if as_json:
        print(json.dumps({"removed" if not dry_run else "would_remove": entry.name, "bytes": entry.bytes}))
    else:
        print(f"{'would remove' if dry_run else 'removed'} {line}")


def _find(name: str) -> Entry:
    """Raises ConfigError."""
    from odmoe.inventory.checkpoints_here import checkpoints_here
    from odmoe.inventory.entry import SHIPPED
    from odmoe.inventory.stores_here import stores_here

    found = [*checkpoints_here(), *stores_here()]
    named = [one for one in found if one.name == name]
    if not named:
        near = nearest(name, [one.name for one in found]) or ""
        raise ConfigError(f"there is no model {name!r} here{near}; odmoe models lists them")
    entry = next((one for one in named if one.kind != SHIPPED), None)
    if entry is None:
        raise ConfigError(f"{name} came with OD-MoE, at {named[0].path}; what is installed is not removed here")
    return entry


def _check_unused(entry: Entry) -> None:
    """Raises StoreWriteError naming a process that uses it."""
    from odmoe.inventory.in_use import processes_using

    users = processes_using(Path(entry.path))
    if users:
        number, command = users[0]
        more = f", and {len(users) - 1} more processes" if len(users) > 1 else ""
        raise StoreWriteError(f"{entry.name} is in use by process {number} ({command[:60]}){more}; end that first")


def _ask(line: str) -> None:
    """Raises ConfigError if nobody can be asked, typer.Abort at Ctrl-C, typer.Exit at no."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on; give -y to remove it, or --dry-run to see what would go")
    if not typer.confirm(f"remove {line}?", err=True):
        raise typer.Exit(1)


def _remove(entry: Entry) -> None:
    from odmoe.inventory.checkpoints_here import remove_checkpoint
    from odmoe.inventory.entry import STORE
    from odmoe.inventory.stores_here import remove_store

    if entry.kind == STORE:
        remove_store(Path(entry.path))
    else:
        remove_checkpoint(entry)

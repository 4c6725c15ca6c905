"""`odmoe down`: stop a cluster."""

from __future__ import annotations

from odmoe.commands.shared.options import ErrorsOnly, File, LibrariesDebug


def down(file: File, quiet: ErrorsOnly = False, debug: LibrariesDebug = False) -> None:
    """Stop nodes and Ray on every machine of a cluster file."""
    from odmoe.machines.down import down as take_down
    from odmoe.terminal import Terminal

    take_down(file, Terminal(quiet, debug))

"""`odmoe models`: the checkpoints and stores on this machine."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import Counter
from dataclasses import asdict, replace

from odmoe.commands.shared.options import Json
from odmoe.inventory.entry import SHIPPED, Entry
from odmoe.terminal import aligned

_HEADER = ("SIZE", "USED", "FAMILY", "FORMAT")


def models(as_json: Json = False) -> None:
    """List the models on this machine: checkpoints, and the stores made from them.

    odmoe rm NAME removes one. A store is made again when its model is used.
    """
    from odmoe.inventory.checkpoints_here import checkpoints_here
    from odmoe.inventory.stores_here import stores_here

    checkpoints, stores = checkpoints_here(), stores_here()
    if as_json:
        print(json.dumps({"models": [asdict(one) for one in [*checkpoints, *stores]]}))
        return
    print("\n".join(_lines(checkpoints, stores)))


def _lines(checkpoints: list[Entry], stores: list[Entry]) -> list[str]:
    if not checkpoints and not stores:
        return ["no models here; odmoe pull demo copies the demo model, odmoe pull org/name fetches one"]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    sections = [("CHECKPOINT", checkpoints), ("STORE", stores)]
    tables = ["\n".join(_table(title, entries, width)) for title, entries in sections if entries]
    total = sum(one.bytes for one in [*checkpoints, *stores]) / 1e9
    return ["\n\n".join(tables), "", f"{total:.2f} GB; odmoe rm NAME removes one that did not come with OD-MoE"]


def _table(title: str, entries: list[Entry], width: int | None) -> list[str]:
    """A line for each; in a narrow terminal family and format have a line of their own."""
    rows = list(map(_row, _with_own_names(entries)))
    lines = aligned([(title, *_HEADER), *rows], right=(1,))
    if width is None or max(map(len, lines)) <= width:
        return lines
    short = [(title, *_HEADER[:2]), *(row[:3] for row in rows)]
    head, *rest = aligned(short, right=(1,))
    return [
        head,
        *(line for one, row in zip(entries, rest, strict=True) for line in (row, f"  {_family_and_format(one)}")),
    ]


def _with_own_names(entries: list[Entry]) -> list[Entry]:
    """`odmoe pull demo` copies a model that came with OD-MoE, whose name then stands for the copy."""
    counts = Counter(one.name for one in entries)
    return [
        replace(one, name=f"{one.name} (OD-MoE's own)") if one.kind == SHIPPED and counts[one.name] > 1 else one
        for one in entries
    ]


def _row(one: Entry) -> tuple[str, ...]:
    day = time.strftime("%Y-%m-%d", time.localtime(one.last_used))
    size = f"{one.bytes / 1e9:.2f} GB" if one.bytes >= 1e8 else f"{one.bytes / 1e6:.1f} MB"
    return one.name, size, day, one.family, _format(one)


def _format(one: Entry) -> str:
    return f"{one.format}; dense {one.dense}" if one.dense else one.format


def _family_and_format(one: Entry) -> str:
    return ", ".join(filter(None, [one.family, _format(one)]))

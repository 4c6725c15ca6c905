"""A table of hosts: redrawn at each change in a terminal, a line for each change elsewhere."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from odmoe.machines.cluster_file import ClusterFile, Host
from odmoe.machines.head import NODE_UNKNOWN
from odmoe.terminal import aligned, count_text, megabytes
from scheduler.errors import HostError
from scheduler.one_line import one_line

COLORS = {"ready": "green", "failed": "red", "lost": "red", "unreachable": "red"}
COLUMNS = ("host", "address", "state", "ray", "store", "slots", "loads", "memory", "trip", "device", "detail")
WIDE = 120
"""From this width on a terminal shows the devices, too."""
NARROW = 94
"""Below this width a terminal shows no addresses and no memory."""
STORE = 12
"""Characters of a store's name that a terminal shows."""

Row = dict[str, Any]


class HostTable:
    """The hosts of a cluster file, in its order, and others that have joined. Used from several threads."""

    def __init__(self, console: Console, cluster: ClusterFile) -> None:
        self._console = console
        self._changing = threading.Lock()
        self.rows: dict[str, Row] = {host.address: empty_row(host) for host in cluster.hosts}
        self._last_text: dict[str, str] = {}
        self._live: Live | None = None

    @contextlib.contextmanager
    def show(self) -> Iterator[None]:
        """Draw the table while the context lasts, on a terminal."""
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self.draw, console=self._console, refresh_per_second=4) as self._live:
            yield
        self._live = None

    def change(self, address: str, /, **facts: Any) -> None:
        with self._changing:
            self.rows.setdefault(address, empty_row(None, address)).update(facts)
            self._print_change(address)

    def set_failed(self, address: str, error: HostError, state: str = "failed") -> None:
        self.change(address, state=state, detail=cause(error))

    def update(self, snapshot: dict[str, Any]) -> None:
        """Update all rows from the head's states."""
        for row in snapshot["hosts"]:
            self.change(row["address"], **{key: value for key, value in row.items() if key != "address"})

    def draw(self, width: int | None = None) -> Group:
        """For a terminal: a line for each host, and details of some below."""
        width = width or self._console.width
        left_out = (
            {"detail"} | ({"device"} if width < WIDE else set()) | ({"address", "memory"} if width < NARROW else set())
        )
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
        for name in COLUMNS:
            if name not in left_out:
                table.add_column(name, no_wrap=True, max_width=STORE if name == "store" else None)
        details = Text()
        with self._changing:
            for row in self.rows.values():
                shown = dict(zip(COLUMNS, cells(row), strict=True))
                color = COLORS.get(row["state"], "yellow")
                table.add_row(
                    *(Text(shown[name], color if name == "state" else "") for name in COLUMNS if name not in left_out)
                )
                if shown["detail"]:
                    details.append(f"{row['name']} ({row['address']}): {shown['detail']}\n")
        details.rstrip()
        return Group(table, details) if details else Group(table)

    def as_text(self) -> str:
        """As text, with columns as wide as what is in them."""
        return "\n".join(aligned([COLUMNS, *map(cells, self.rows.values())]))

    def _print_change(self, address: str) -> None:
        """Without a terminal: print the change of a host's state."""
        row = self.rows[address]
        detail = f": {one_line(row['detail'])}" if row["detail"] else ""
        text = f"{row['name']} ({address}) {row['state']}{detail}"
        new = self._last_text.get(address) != text and (row["state"] != "waiting" or detail)
        self._last_text[address] = text
        if self._console.is_terminal or not new:
            return
        self._console.print(text, markup=False, soft_wrap=True)


def empty_row(host: Host | None, address: str = "") -> Row:
    """The row of a host before its first answer."""
    return {
        "name": host.name if host else "joined",
        "role": host.role if host else None,
        "address": host.address if host else address,
        "number": host.number if host else None,
        "state": "waiting",
        "detail": "",
        "ray": None,
        **NODE_UNKNOWN,
    }


def cells(row: Row) -> list[str]:
    """A row's texts, in the order of COLUMNS."""
    rate = row["load_bytes_per_s"]
    loads = f"{row['loader'] or ''} {megabytes(int(rate))}/s".strip() if rate else row["loader"] or ""
    trip = "" if row["round_trip_s"] is None else f"{1e3 * row['round_trip_s']:.2f} ms"
    detail = str(row["detail"])
    if (row["heartbeat_s"] or 0.0) > 5.0:
        detail = f"no heartbeat for {row['heartbeat_s']:.0f} s" + (f"; {detail}" if detail else "")
    texts = [
        row["name"],
        row["address"],
        row["state"],
        row["ray"] or "",
        row["store"] or "",
        str(row["slots"] or ""),
        loads,
        "" if row["memory_bytes"] is None else megabytes(int(row["memory_bytes"])),
        trip,
        row["device"] or "",
        detail,
    ]
    return list(map(one_line, texts))


def cause(error: HostError) -> str:
    """The error's message without the host, which the row has."""
    return str(error).partition("): ")[2] or str(error)


@contextlib.contextmanager
def copy_bars(console: Console, what: str) -> Iterator[Callable[[str, int, int], None]]:
    """A callback `(host, done, total)` in bytes that draws a bar for each host. Without a terminal there is a line at
    the start and one at the end."""
    bytes_of: dict[str, tuple[int, int]] = {}
    began = time.monotonic()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown, expand=True) as bars:
        tasks: dict[str, TaskID] = {}

        def step(host: str, done: int, total: int) -> None:
            if not bytes_of and not shown:
                console.print(f"{what}: {megabytes(total)} each", markup=False, soft_wrap=True)
            bytes_of[host] = done, total
            if host not in tasks:
                tasks[host] = bars.add_task(f"{what}, {one_line(host)}", total=total)
            bars.update(tasks[host], completed=done, total=total)

        yield step
    if bytes_of:
        copied = sum(done for done, _ in bytes_of.values())
        rate = megabytes(int(copied / max(0.1, time.monotonic() - began)))
        hosts = count_text(len(bytes_of), "host")
        console.print(f"{what}: {megabytes(copied)} to {hosts}, {rate}/s", markup=False, soft_wrap=True)

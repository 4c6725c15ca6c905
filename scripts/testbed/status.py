"""What `python -m scripts.testbed status` says of a host, found from the launching machine."""

from __future__ import annotations

import re
import socket
from collections import Counter
from pathlib import Path
from typing import Any

from rich.table import Table

from odmoe.machines.cluster_file import Host
from scripts.testbed import links
from scripts.testbed.layout import Layout
from scripts.testbed.namespaces import Running

SSH_S = 2.0

RAY = (
    (r"ray::(\S+)", r"\1"),
    (r"/raylet/raylet(?:\s|$)", "raylet"),
    (r"gcs_server(?:\s|$)", "gcs_server"),
    (r"/(dashboard|log_monitor|monitor|agent|main)\.py", r"\1"),
)
"""How Ray's processes are known by their command lines, and what they are called here."""


def host_status(layout: Layout, host: Host, running: Running | None) -> dict[str, Any]:
    device = layout.link(host)
    there = links.exists(device)
    received, sent = links.counters(device) if there else (0, 0)
    pids = running.inside if running else []
    return {
        "host": host.name,
        "address": host.address,
        "up": bool(running and running.first),
        "plugged": there and links.plugged(device),
        "ssh": bool(running) and answers(host.address),
        "rate_bit_s": links.rate_of(device) if there else 0.0,
        "processes": len(pids),
        "ray": dict(Counter(filter(None, map(ray_name, pids)))),
        "memory_bytes": sum(map(memory, pids)),
        "received_bytes": received,
        "sent_bytes": sent,
        "first_process": running.first if running else None,
        "link": device,
    }


def answers(address: str) -> bool:
    """Whether something there begins to speak as sshd does."""
    try:
        with socket.create_connection((address, 22), timeout=SSH_S) as connection:
            connection.settimeout(SSH_S)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def ray_name(pid: int) -> str:
    """What Ray calls the process; empty if it is none of Ray's."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    if "ray" not in command:
        return ""
    for pattern, name in RAY:
        if found := re.search(pattern, command):
            return found.expand(name)
    return ""


def memory(pid: int) -> int:
    """The process's share of what it has in memory, in bytes: pages that n processes map count 1/n in each."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.M)
    return int(found[1]) * 1024 if found else 0


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table("host", "address", "state", "ssh", "link", "processes", "memory", "in", "out", "of Ray")
    for row in rows:
        state = "up" if row["plugged"] else "unplugged"
        rate = links.spoken(row["rate_bit_s"]) if row["rate_bit_s"] else "none"
        ray = ", ".join(f"{count} {name}" if count > 1 else name for name, count in sorted(row["ray"].items()))
        shown.add_row(
            row["host"],
            row["address"],
            state if row["up"] else "down",
            "answers" if row["ssh"] else "no",
            rate,
            str(row["processes"]),
            f"{row['memory_bytes'] / 2**20:.0f} MiB",
            f"{row['received_bytes'] / 1e6:.1f} MB",
            f"{row['sent_bytes'] / 1e6:.1f} MB",
            ray,
        )
    return shown

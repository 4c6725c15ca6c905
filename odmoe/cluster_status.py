"""`odmoe status`: a row a host, from the host itself and from the head; one that does not answer is a row with why."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from odmoe.clusters import cluster_dir
from odmoe.head_link import Head, Snapshot
from odmoe.host_table import HostTable, Row
from odmoe.hosts import ClusterFile, read_cluster_file
from odmoe.preflight import probe
from odmoe.ssh import Ssh
from scheduler.errors import HostError, ODMoEError

HEAD_S = 45.0
EVERY_S = 2.0


def status(file: Path, watch: bool = False, as_json: bool = False) -> bool:
    """Print what every host is doing to standard output, with `watch` again and again; whether all was ready the last
    time. Raises ConfigError."""
    cluster = read_cluster_file(file)
    console = Console(file=sys.stdout, highlight=False)
    with Ssh.of(cluster, cluster_dir(cluster.name)) as ssh:
        if watch and not as_json and console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                while True:
                    table, _ = _look(ssh, cluster, console)
                    live.update(table.drawn(), refresh=True)
                    time.sleep(EVERY_S)
        while True:
            table, found = _look(ssh, cluster, console)
            print(json.dumps(found) if as_json else _text(table, found), flush=True)
            if not watch:
                return bool(found["ready"])
            time.sleep(EVERY_S)


def _look(ssh: Ssh, cluster: ClusterFile, console: Console) -> tuple[HostTable, dict[str, Any]]:
    """All hosts and the head, asked at once."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(_head, ssh, cluster)
        facts = ssh.each(cluster.hosts, lambda host: probe(ssh, host))
        seen = asked.result()
    table = HostTable(Console(quiet=True), cluster)
    table.see(seen)
    for host in cluster.hosts:
        found = facts[host.address]
        if isinstance(found, HostError):
            table.failed(host.address, found, "unreachable")
        else:
            table.change(host.address, **_own(found, table.rows[host.address]))
    rows = list(table.rows.values())
    ready = bool(seen["ready"]) and all(row["state"] in ("ready", "unused") for row in rows)
    return table, {"cluster": cluster.name, "ready": ready, "error": seen.get("error"), "hosts": rows}


def _head(ssh: Ssh, cluster: ClusterFile) -> Snapshot:
    """What the head says; no hosts and the error where it says nothing."""
    try:
        return Head(ssh, cluster).status(HEAD_S)
    except ODMoEError as error:
        said = {"type": type(error).__name__, "message": str(error)}
        return {"hosts": [], "ready": False, "error": said}


def _own(facts: dict[str, Any], row: Row) -> Row:
    """What the host itself knows, beside what the head says of it."""
    runs = bool(facts["processes"])
    known = {name: facts[name] for name in ("cores", "gpus", "disk_free", "processes", "code")}
    stores = ", ".join(name for name, store in facts["stores"].items() if not store["fault"])
    return {
        **known, "store": row["store"] or stores, "ram": facts["memory"], "skew_s": facts["skew_s"],
        "ray": row["ray"] or ("alive" if runs else "down"), "state": row["state"] if runs else "down",
    }  # fmt: skip


def _text(table: HostTable, found: dict[str, Any]) -> str:
    error = f"\nhead: {found['error']['type']}: {found['error']['message']}" if found["error"] else ""
    return table.plain() + error

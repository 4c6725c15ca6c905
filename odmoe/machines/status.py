"""`odmoe status`: a row for each host, from the host and from the head; without an answer the row has the reason."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from odmoe.machines.certificate_ends import end_of, ends_text
from odmoe.machines.cluster_file import ClusterFile, read_cluster_file
from odmoe.machines.head import Head, HostStates
from odmoe.machines.home import cluster_dir, cluster_id
from odmoe.machines.owners.ownership import describe_owner, other_owner
from odmoe.machines.preflight import probe
from odmoe.machines.ssh import Ssh
from odmoe.machines.table import HostTable, Row
from scheduler.errors import HostError, ODMoEError

HEAD_S = 45.0
EVERY_S = 2.0
AT_HEAD_NAME = "odmoe.at_head"


def status(file: Path, watch: bool = False, as_json: bool = False) -> bool:
    """Print the state of every host to standard output, with `watch` repeatedly. Returns whether all were ready the
    last time. Raises ConfigError."""
    cluster = read_cluster_file(file)
    console = Console(file=sys.stdout, highlight=False)
    with Ssh.for_cluster(cluster, cluster_dir(cluster.name)) as ssh:
        if watch and not as_json and console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                while True:
                    table, _ = _look(ssh, cluster, console)
                    live.update(table.draw(console.width), refresh=True)
                    time.sleep(EVERY_S)
        while True:
            table, found = _look(ssh, cluster, console)
            if console.is_terminal and not as_json:
                console.print(table.draw(console.width))
                print(_below(found, cluster.path), end="", flush=True)
            else:
                print(
                    json.dumps(found) if as_json else f"{table.as_text()}\n{_below(found, cluster.path)}".rstrip("\n"),
                    flush=True,
                )
            if not watch:
                return bool(found["ready"])
            time.sleep(EVERY_S)


def _look(ssh: Ssh, cluster: ClusterFile, console: Console) -> tuple[HostTable, dict[str, Any]]:
    """Inspect all hosts and the head at once."""
    with ThreadPoolExecutor(1) as pool:
        try:
            asked = pool.submit(_head, ssh, cluster)
            facts = ssh.each(cluster.hosts, lambda host: probe(ssh, host))
            seen = asked.result()
        except BaseException:  # Ctrl-C: do not wait for the head's answer
            ssh.close()
            raise
    own = cluster_id(cluster_dir(cluster.name))
    seen = _put_simply(seen, facts[cluster.main.address], cluster, own)
    table = HostTable(Console(quiet=True), cluster)
    table.update(seen)
    for host in cluster.hosts:
        found = facts[host.address]
        if isinstance(found, HostError):
            table.set_failed(host.address, found, "unreachable")
        else:
            table.change(host.address, **_own(found, table.rows[host.address], own))
    rows = list(table.rows.values())
    ready = bool(seen["ready"]) and all(row["state"] in ("ready", "unused") for row in rows)
    return table, {"cluster": cluster.name, "ready": ready, "error": seen.get("error"), "hosts": rows}


def _head(ssh: Ssh, cluster: ClusterFile) -> HostStates:
    """The head's states; on failure no hosts, and the error."""
    try:
        return Head(ssh, cluster).status(HEAD_S)
    except ODMoEError as error:
        error_facts = {"type": type(error).__name__, "message": str(error)}
        return {"hosts": [], "ready": False, "error": error_facts}


def _put_simply(
    seen: HostStates, head: dict[str, Any] | HostError, cluster: ClusterFile, own: str | None
) -> HostStates:
    """Replace the error of a head on which nothing runs, and the states of a head that is another cluster's, by a plain
    message."""
    name = f"{cluster.main.name} ({cluster.main.address})"
    if not isinstance(head, HostError) and (owner := other_owner(head, own)):
        return _without_states(f"{name} belongs to {describe_owner(owner)}")
    if isinstance(head, HostError) or not seen.get("error") or _runs(head):
        return seen
    return {**seen, **_without_states(f"nothing runs on {name}; odmoe up {cluster.path} changes that")}


def _without_states(message: str) -> HostStates:
    return {"hosts": [], "ready": False, "error": {"type": "LaunchError", "message": message}}


def _runs(facts: dict[str, Any]) -> bool:
    """Whether a process of the cluster runs on a host, apart from our own request to the head."""
    return any(name != AT_HEAD_NAME for name in facts.get("processes", ()))


def _own(facts: dict[str, Any], row: Row, own: str | None) -> Row:
    """Add the host's own facts to its row from the head. `own`: the id of this cluster."""
    if "processes" not in facts:
        return {"state": "unfit", "detail": f"its Python is {facts['python']}, 3.11 or newer is needed"}
    if owner := other_owner(facts, own):
        return {"state": "occupied", "detail": f"it belongs to {describe_owner(owner)}", "owner": owner}
    runs, end = _runs(facts), end_of(facts["node_certificate"])
    known = {name: facts[name] for name in ("cores", "gpus", "disk_free", "processes", "code")}
    stores = ", ".join(name for name, store in facts["stores"].items() if not store["fault"])
    return {
        **known,
        "owner": facts["owner"] if "cluster" in facts["owner"] else None,
        "store": row["store"] or stores,
        "ram": facts["memory"],
        "skew_s": facts["skew_s"],
        "certificate_end": None if end is None else end.isoformat(),
        "ray": row["ray"] or ("alive" if runs else "down"),
        "state": row["state"] if runs else "down",
    }


def _below(found: dict[str, Any], file: Path) -> str:
    """The head's error, whose the hosts are, by the first that says so, and when their certificates end."""
    error = f"head: {found['error']['type']}: {found['error']['message']}\n" if found["error"] else ""
    owner = next((row["owner"] for row in found["hosts"] if row["state"] != "occupied" and row.get("owner")), None)
    ends = {row["name"]: datetime.fromisoformat(end) for row in found["hosts"] if (end := row.get("certificate_end"))}
    owned = f"owner: {describe_owner(owner)}\n" if owner else ""
    return error + owned + ends_text(ends, len(found["hosts"]), str(file), datetime.now(UTC))

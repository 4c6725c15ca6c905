"""`odmoe host-stores`: the expert stores on the hosts of a cluster file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from odmoe.machines.cluster_file import ClusterFile, Host, read_cluster_file
from odmoe.machines.home import cluster_dir, cluster_id
from odmoe.machines.preflight import ask
from odmoe.machines.ssh import Ssh
from odmoe.machines.table import cause
from odmoe.terminal import aligned, megabytes
from scheduler.errors import ConfigError, HostError, LaunchError
from scheduler.one_line import one_line

LIST_S = 60.0
REMOVE_S = 600.0
COLUMNS = ("host", "address", "store", "size", "state")

Facts = dict[str, Any]


def list_stores(file: Path, as_json: bool = False) -> None:
    """Print a line for each store on each host. Raises ConfigError, or LaunchError if a host does not answer; such
    hosts are printed before."""
    cluster = read_cluster_file(file)
    with Ssh.for_cluster(cluster, cluster_dir(cluster.name)) as ssh:
        found = ssh.each(cluster.hosts, lambda host: ask(ssh, host, "host_stores", LIST_S))
    good, failed = _split_answers(cluster, found)
    if as_json:
        print(json.dumps({host.name: answer.get("stores", {}) for host, answer in good}), flush=True)
    else:
        rows = [
            (host.name, host.address, name, megabytes(store["bytes"]), _state(store))
            for host, answer in good
            for name, store in answer.get("stores", {}).items()
        ]
        for line in aligned([list(map(one_line, row)) for row in [COLUMNS, *rows]]) if rows else ["no stores"]:
            print(line, flush=True)
    _raise(failed)


def remove_stores(file: Path, names: list[str], as_json: bool = False) -> None:
    """Remove stores by name from every host on which nothing uses them. Raises ConfigError for a name that no store
    can have, or LaunchError if a store is nowhere, or stays on a host; such hosts are printed before."""
    for name in names:
        if not name or "/" in name or name in (".", ".."):
            raise ConfigError(f"--remove is {name!r}; allowed: a store's name, as odmoe host-stores {file} lists it")
    cluster = read_cluster_file(file)
    folder = cluster_dir(cluster.name)
    wanted = {"id": cluster_id(folder) or "", "names": names}
    with Ssh.for_cluster(cluster, folder) as ssh:
        found = ssh.each(cluster.hosts, lambda host: ask(ssh, host, "remove_stores", REMOVE_S, wanted))
    good, failed = _split_answers(cluster, found)
    if as_json:
        print(json.dumps({host.name: answer for host, answer in good}), flush=True)
    kept = 0
    for host, answer in good:
        for name, size in answer.get("removed", {}).items():
            if not as_json:
                print(f"{host.name} ({host.address}): removed {name}, {megabytes(size)}", flush=True)
        for name, why in answer.get("kept", {}).items():
            kept += 1
            print(f"{host.name} ({host.address}): {name} stays: {why}", file=sys.stderr, flush=True)
    _raise(failed)
    if kept:
        raise LaunchError("not every store was removed; see above. odmoe down ends what uses one")
    seen = {name for _, answer in good for name in answer.get("removed", {})}
    if missing := [name for name in names if name not in seen]:
        raise LaunchError(f"no host has the store {missing[0]}; odmoe host-stores {file} lists what there is")


def _split_answers(
    cluster: ClusterFile, found: dict[str, Facts | HostError]
) -> tuple[list[tuple[Host, Facts]], list[str]]:
    """The answers, and a line for each host without one."""
    good, failed = [], []
    for host in cluster.hosts:
        answer = found[host.address]
        if isinstance(answer, HostError):
            failed.append(f"{host.name} ({host.address}): {cause(answer)}")
        else:
            good.append((host, answer))
    return good, failed


def _raise(failed: list[str]) -> None:
    for line in failed:
        print(line, file=sys.stderr, flush=True)
    if failed:
        raise LaunchError(f"{len(failed)} hosts did not answer; see above")


def _state(store: Facts) -> str:
    part = "part: {} of {} experts; ".format(*held) if (held := store.get("held")) else ""
    whole = part if store["whole"] else "unfinished; "
    return f"{whole}{'in use: ' + store['used'] if store['used'] else 'not in use'}"

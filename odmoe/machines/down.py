"""`odmoe down`: ends the nodes and Ray on every host, checks that no process of theirs is left, and frees the hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from odmoe.machines.cluster_file import Host, read_cluster_file
from odmoe.machines.head import Head
from odmoe.machines.home import cluster_dir, cluster_id, only_one
from odmoe.machines.owners.claims import left_alone
from odmoe.machines.owners.launch_record import check_same_file, end_former, forget, remember
from odmoe.machines.owners.ownership import other_owner
from odmoe.machines.preflight import probe, stop_processes
from odmoe.machines.ray_cli import run_ray
from odmoe.machines.ssh import Ssh
from odmoe.machines.table import cause
from odmoe.terminal import Terminal
from scheduler.errors import HostError, LaunchError, ODMoEError

NODES_S = 40.0
RAY_S = 120.0
Say = Callable[[str], None]


def down(file: Path, terminal: Terminal) -> None:
    """End a cluster. Raises ConfigError, or LaunchError if a host is another cluster's, which is left alone, or
    unreachable, or still runs something; such hosts are printed before."""

    def say(text: str) -> None:
        terminal.console.print(text, markup=False, soft_wrap=True)

    cluster = read_cluster_file(file)
    folder = cluster_dir(cluster.name)
    with only_one(folder), Ssh.for_cluster(cluster, folder) as ssh:
        check_same_file(folder, cluster)
        own = cluster_id(folder)
        runs = {host.address: found for host, found in _probe_all(ssh, cluster.hosts)}
        others = {address: owner for address, found in runs.items() if (owner := _other_owner(found, own))}
        head = runs[cluster.main.address]
        if cluster.main.address not in others:
            if isinstance(head, dict) and head.get("processes"):
                _stop_nodes(Head(ssh, cluster), say)
            try:
                run_ray(cluster, folder, "down", RAY_S, say if terminal.debug else lambda line: None)
            except LaunchError as error:
                say(str(error))
        former = end_former(ssh, cluster, folder, terminal.print_always)
        reached = [host for host in cluster.hosts if isinstance(runs[host.address], dict)]
        ended = ssh.each(reached, lambda host: stop_processes(ssh, host, own, release=True))
    others |= {address: owner for address, found in ended.items() if (owner := _other_owner(found, own))}
    foreign = [host for host in cluster.hosts if host.address in others]
    for host in foreign:
        terminal.print_always(f"{host.name} ({host.address}): {left_alone(others[host.address])}")
    failed = [
        host
        for host in cluster.hosts
        if host not in foreign
        and not _report_host(host, runs[host.address], ended.get(host.address), say, terminal.print_always)
    ]
    if former:
        remember(folder, cluster, former)
    elif not failed:
        forget(folder)
    for hosts, state in ((failed, "may still run something"), (foreign, "belong to another cluster")):
        if hosts:
            names = ", ".join(host.name for host in hosts)
            raise LaunchError(f"{len(hosts)} of {len(cluster.hosts)} hosts {state}: {names}; see above")
    say(f"nothing runs any more on {len(cluster.hosts)} hosts")


def _stop_nodes(head: Head, say: Say) -> None:
    try:
        head.stop(NODES_S)
    except ODMoEError as error:
        say(f"the nodes could not be asked to stop, and are killed: {error}")


def _other_owner(found: Any, own: str | None) -> dict[str, Any] | None:
    return other_owner(found, own) if isinstance(found, dict) else None


def _probe_all(ssh: Ssh, hosts: tuple[Host, ...]) -> list[tuple[Host, Any]]:
    found = ssh.each(hosts, lambda host: probe(ssh, host))
    return [(host, found[host.address]) for host in hosts]


def _report_host(host: Host, asked: Any, ended: Any, say: Say, print_always: Say) -> bool:
    """Print the processes that `ray down` left and that were killed, and why a host may still run something."""
    error = next((found for found in (asked, ended) if isinstance(found, HostError)), None)
    if error is not None:
        print_always(f"{host.name} ({host.address}): not stopped: {cause(error)}")
        return False
    stopped, left = ended.get("stopped"), ended.get("left", ["what its python3, older than 3.7, cannot list"])
    if stopped:
        say(f"{host.name} ({host.address}): ended what was left: {', '.join(stopped)}")
    if left:
        print_always(f"{host.name} ({host.address}): cannot be ended: {', '.join(left)}; see there")
    return not left

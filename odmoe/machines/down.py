"""`odmoe down`: ends the nodes and Ray on every host, and checks that no process of theirs is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from odmoe.machines.cluster_file import Host, read_cluster_file
from odmoe.machines.head import Head
from odmoe.machines.home import cluster_dir, only_one
from odmoe.machines.launch_record import end_former, forget
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
    """End a cluster. Raises ConfigError, or LaunchError if a host is unreachable or still runs something; such hosts
    are printed before."""

    def say(text: str) -> None:
        terminal.console.print(text, markup=False, soft_wrap=True)

    cluster = read_cluster_file(file)
    folder = cluster_dir(cluster.name)
    with only_one(folder), Ssh.of(cluster, folder) as ssh:
        runs = {host.address: found for host, found in _asked(ssh, cluster.hosts)}
        head = runs[cluster.main.address]
        if isinstance(head, dict) and head.get("processes"):
            try:
                Head(ssh, cluster).stop(NODES_S)
            except ODMoEError as error:
                say(f"the nodes were not stopped in order: {error}")
        try:
            run_ray(cluster, folder, "down", RAY_S, say if terminal.debug else lambda line: None)
        except LaunchError as error:
            say(str(error))
        end_former(ssh, cluster, folder, terminal.complain)
        reached = [host for host in cluster.hosts if isinstance(runs[host.address], dict)]
        ended = ssh.each(reached, lambda host: stop_processes(ssh, host))
    failed = [
        host
        for host in cluster.hosts
        if not _ended(host, runs[host.address], ended.get(host.address), say, terminal.complain)
    ]
    if failed:
        names = ", ".join(host.name for host in failed)
        raise LaunchError(f"{len(failed)} of {len(cluster.hosts)} hosts may still run something: {names}; see above")
    forget(folder)
    say(f"nothing runs any more on {len(cluster.hosts)} hosts")


def _asked(ssh: Ssh, hosts: tuple[Host, ...]) -> list[tuple[Host, Any]]:
    found = ssh.each(hosts, lambda host: probe(ssh, host))
    return [(host, found[host.address]) for host in hosts]


def _ended(host: Host, asked: Any, ended: Any, say: Say, complain: Say) -> bool:
    """Print the processes that `ray down` left and that were killed, and why a host may still run something."""
    error = next((found for found in (asked, ended) if isinstance(found, HostError)), None)
    if error is not None:
        complain(f"{host.name} ({host.address}): not stopped: {cause(error)}")
        return False
    stopped, left = ended.get("stopped"), ended.get("left", ["what its python3, older than 3.7, cannot list"])
    if stopped:
        say(f"{host.name} ({host.address}): ended what was left: {', '.join(stopped)}")
    if left:
        complain(f"{host.name} ({host.address}): cannot be ended: {', '.join(left)}; see there")
    return not left

"""`odmoe down`: the nodes and Ray end on every host, and it is seen to that nothing is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from odmoe.clusters import cluster_dir
from odmoe.head_link import Head
from odmoe.host_table import cause
from odmoe.hosts import Host, read_cluster_file
from odmoe.preflight import probe, stop_processes
from odmoe.ray_cli import run_ray
from odmoe.ssh import Ssh
from odmoe.terminal import Terminal
from scheduler.errors import HostError, LaunchError, ODMoEError

NODES_S = 40.0
RAY_S = 120.0


def down(file: Path, terminal: Terminal) -> None:
    """Raises ConfigError; LaunchError: a host could not be reached, or something is left there; each has been named."""

    def say(text: str) -> None:
        terminal.console.print(text, markup=False, soft_wrap=True)

    cluster = read_cluster_file(file)
    folder = cluster_dir(cluster.name)
    with Ssh.of(cluster, folder) as ssh:
        runs = {host.address: found for host, found in _asked(ssh, cluster.hosts)}
        head = runs[cluster.main.address]
        if isinstance(head, dict) and head["processes"]:
            try:
                Head(ssh, cluster).stop(NODES_S)
            except ODMoEError as error:
                say(f"the nodes were not stopped in order: {error}")
        try:
            run_ray(cluster, folder, "down", RAY_S, say if terminal.debug else lambda line: None)
        except LaunchError as error:
            say(str(error))
        reached = [host for host in cluster.hosts if isinstance(runs[host.address], dict)]
        ended = ssh.each(reached, lambda host: stop_processes(ssh, host))
    failed = [host for host in cluster.hosts if not _ended(host, runs[host.address], ended.get(host.address), say)]
    if failed:
        names = ", ".join(host.name for host in failed)
        raise LaunchError(f"{len(failed)} of {len(cluster.hosts)} hosts may still run something: {names}; see above")
    say(f"nothing runs any more on {len(cluster.hosts)} hosts")


def _asked(ssh: Ssh, hosts: tuple[Host, ...]) -> list[tuple[Host, Any]]:
    found = ssh.each(hosts, lambda host: probe(ssh, host))
    return [(host, found[host.address]) for host in hosts]


def _ended(host: Host, asked: Any, ended: Any, say: Any) -> bool:
    """Says what had to be ended beyond `ray down`, and why a host may still run something."""
    error = next((found for found in (asked, ended) if isinstance(found, HostError)), None)
    if error is not None:
        say(f"{host.name} ({host.address}): not stopped: {cause(error)}")
        return False
    if ended["stopped"]:
        say(f"{host.name} ({host.address}): ended what was left: {', '.join(ended['stopped'])}")
    if ended["left"]:
        say(f"{host.name} ({host.address}): cannot be ended: {', '.join(ended['left'])}; see there")
    return not ended["left"]

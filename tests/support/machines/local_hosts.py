"""Hosts that are homes on this machine, without sshd: commands for them run here, in their home."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from odmoe.machines.cluster_file import ClusterFile, Host
from odmoe.machines.ssh import Ssh
from scheduler.errors import HostError
from support.machines.ssh_hosts import write_cluster_file

_PATH = f"{sys.base_prefix}/bin:{os.environ['PATH']}"
"""Where python3 is a program: a version manager's script in its place takes longer than what it starts."""


class LocalSsh(Ssh):
    """`homes`: a folder with a home for each address."""

    def __init__(self, folder: Path) -> None:
        super().__init__("nobody", None, folder / "known_hosts")
        self.homes = folder / "homes"

    def home(self, address: str) -> Path:
        return self.homes / address

    def run(self, host: Host, command: str, deadline_s: float, data: bytes | None = None) -> str:
        home = self.home(host.address)
        if not home.is_dir():
            raise HostError(f"{host.name} ({host.address}): it does not answer ssh")
        done = subprocess.run(
            ["sh", "-c", command],
            input=data or b"",
            env=os.environ | {"HOME": str(home), "PATH": _PATH},
            capture_output=True,
            timeout=deadline_s,
            check=False,
        )
        if done.returncode != 0:
            raise HostError(f"{host.name} ({host.address}): {done.stderr.decode()[-500:]}")
        return done.stdout.decode()


def local_cluster(folder: Path, ssh: LocalSsh, addresses: tuple[str, ...], name: str) -> ClusterFile:
    """A cluster file in `folder`, of hosts of `ssh`, which are made if they are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for address in addresses:
        ssh.home(address).mkdir(parents=True, exist_ok=True)
    cluster = write_cluster_file(folder, addresses, folder / "key")
    cluster.path.write_text(cluster.path.read_text().replace("odmoe-test", name))
    return ClusterFile(cluster.path, name, cluster.hosts, cluster.user, None)

"""An sshd of our own on loopback, which is several hosts: 127.0.99.1, .2, ... each with a home of its own."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from odmoe.machines.cluster_file import ClusterFile, Host, read_cluster_file

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
COUNT = 4
START_S = 60.0


@dataclass(frozen=True)
class SshHosts:
    """`port`: of all of them. A program in `bin` of a host's home comes before those of its PATH."""

    folder: Path
    port: int
    addresses: tuple[str, ...]

    def home(self, address: str) -> Path:
        return self.folder / "homes" / address

    @property
    def key(self) -> Path:
        return self.folder / "key"

    @property
    def host(self) -> Host:
        return Host("main_node", 0, self.addresses[0])

    def cluster(self, folder: Path) -> ClusterFile:
        """A cluster file in `folder`: main node, shadow and two workers at these addresses."""
        return write_cluster_file(folder, self.addresses, self.key)

    def give_old_python(self, number: int) -> None:
        """The host's python3 is a 3.5 from now on, as far as a program can ask it."""
        path = self.home(self.addresses[number]) / "bin" / "python3"
        path.parent.mkdir(exist_ok=True)
        program = "import sys; sys.version_info = (3, 5, 2); exec(sys.stdin.read())"
        real = sys.executable
        path.write_text(f'#!/bin/sh\n[ "$1" = - ] && exec {real} -c \'{program}\'\nexec {real} "$@"\n')
        path.chmod(0o755)

    def empty(self) -> None:
        """Ends what has the key of a cluster on these hosts, and empties their homes. Links in them are removed, never
        followed."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"RAY_AUTH_TOKEN_PATH={self.folder}/".encode() in (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)
        for address in self.addresses:
            shutil.rmtree(self.home(address), ignore_errors=True)
            self.home(address).mkdir(exist_ok=True)


def write_cluster_file(folder: Path, addresses: tuple[str, ...], key: Path) -> ClusterFile:
    """Of the cluster `odmoe-test`: main node, shadow, and the rest workers."""
    main, shadow, *workers = addresses
    (folder / "cluster.yaml").write_text(
        f"cluster_name: odmoe-test\nprovider:\n  type: external\n  module: odmoe.on_ray.provider.OnPremises\n"
        f"  hosts:\n    main_node: {main}\n"
        f"    shadow_node: {shadow}\n    worker_node: [{', '.join(workers)}]\n"
        f"auth: {{ssh_user: {getpass.getuser()}, ssh_private_key: {key}}}\n"
    )
    return read_cluster_file(folder / "cluster.yaml")


def make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True, timeout=60)


@contextlib.contextmanager
def serve_hosts(folder: Path) -> Iterator[SshHosts]:
    """Skips the test, with the reason, where there is no sshd or it does not run."""
    missing = [name for name in ("ssh", "ssh-keygen", "rsync", "timeout") if shutil.which(name) is None]
    if SSHD is None or missing:
        pytest.skip(f"not installed here: {', '.join(missing or ['sshd'])}")
    for name in ("key", "host_key"):
        make_key(folder / name)
    with socket.socket() as probe:
        probe.bind(("127.0.99.1", 0))
        port = probe.getsockname()[1]
    hosts = SshHosts(folder, port, tuple(f"127.0.99.{n + 1}" for n in range(COUNT)))
    lines = [
        f"Port {port}",
        *(f"ListenAddress {address}" for address in hosts.addresses),
        f"HostKey {folder}/host_key",
        f"AuthorizedKeysFile {folder}/key.pub",
        "StrictModes no",
        "PidFile none",
        "UsePAM no",
        "MaxStartups 50",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin yes",
    ]
    for address in hosts.addresses:
        home = hosts.home(address)
        home.mkdir(parents=True)
        path = f"{home}/bin:{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin"
        lines += [f"Match LocalAddress {address}", f"  SetEnv HOME={home} PATH={path}"]
    (folder / "config").write_text("\n".join(lines) + "\n")
    with contextlib.suppress(PermissionError):
        Path("/run/sshd").mkdir(exist_ok=True)
    with (folder / "log").open("wb") as log:
        sshd = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "config"], stdout=log, stderr=log)
    try:
        _wait(hosts, sshd)
        yield hosts
    finally:
        sshd.terminate()
        sshd.wait(30)


def _wait(hosts: SshHosts, sshd: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    for address in hosts.addresses:
        while True:
            try:
                socket.create_connection((address, hosts.port), 1).close()
                break
            except OSError:
                if time.monotonic() > end or sshd.poll() is not None:
                    pytest.skip(f"sshd does not run here: {(hosts.folder / 'log').read_text()[-300:]}")
                time.sleep(0.05)

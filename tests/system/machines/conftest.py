"""An sshd of our own on loopback, which is several hosts: 127.0.99.1, .2, ... each with a home of its own."""

from __future__ import annotations

import getpass
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from odmoe.machines.cluster_file import ClusterFile, Host, read_cluster_file
from odmoe.machines.ssh import Ssh

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
COUNT = 4


@dataclass(frozen=True)
class Hosts:
    """`names`: addresses; `port`: of all of them; `home(address)`: where their user's files are."""

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

    def cluster(self, path: Path, workers: int = 2, key: Path | None = None) -> ClusterFile:
        """A cluster file of main node, shadow and workers at these addresses; `path` is a directory."""
        main, shadow, *rest = self.addresses
        text = (
            f"cluster_name: odmoe-test\nprovider:\n  type: external\n  module: m\n  hosts:\n    main_node: {main}\n"
            f"    shadow_node: {shadow}\n    worker_node: [{', '.join(rest[:workers])}]\n"
            f"auth: {{ssh_user: {getpass.getuser()}, ssh_private_key: {key or self.key}}}\n"
        )
        (path / "cluster.yaml").write_text(text)
        return read_cluster_file(path / "cluster.yaml")


def keygen(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True, timeout=30)


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    missing = [name for name in ("ssh", "ssh-keygen", "rsync", "timeout") if shutil.which(name) is None]
    if SSHD is None or missing:
        pytest.skip(f"not installed here: {', '.join(missing or ['sshd'])}")
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("key", "host_key"):
        keygen(folder / name)
    with socket.socket() as probe:
        probe.bind(("127.0.99.1", 0))
        port = probe.getsockname()[1]
    addresses = tuple(f"127.0.99.{n + 1}" for n in range(COUNT))
    made = Hosts(folder, port, addresses)
    own = Path(sys.executable).parent
    lines = [
        f"Port {port}", *(f"ListenAddress {address}" for address in addresses), f"HostKey {folder}/host_key",
        f"AuthorizedKeysFile {folder}/key.pub", "StrictModes no", "PidFile none", "UsePAM no", "MaxStartups 50",
        "PasswordAuthentication no", "KbdInteractiveAuthentication no", "PermitRootLogin yes",
    ]  # fmt: skip
    for address in addresses:
        made.home(address).mkdir(parents=True)
        path = f"{own}:/usr/bin:/bin:/usr/sbin:/sbin"
        lines += [f"Match LocalAddress {address}", f"  SetEnv HOME={made.home(address)} PATH={path}"]
    (folder / "config").write_text("\n".join(lines) + "\n")
    Path("/run/sshd").mkdir(exist_ok=True)
    with (folder / "log").open("wb") as log:
        sshd = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "config"], stdout=log, stderr=log)
    try:
        _wait(addresses, port, sshd, folder / "log")
        yield made
    finally:
        sshd.terminate()
        sshd.wait(10)


def _wait(addresses: tuple[str, ...], port: int, sshd: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 10
    for address in addresses:
        while True:
            try:
                socket.create_connection((address, port), 1).close()
                break
            except OSError:
                if time.monotonic() > end or sshd.poll() is not None:
                    pytest.skip(f"sshd does not run here: {log.read_text()[-300:]}")
                time.sleep(0.05)


@pytest.fixture
def ssh(hosts: Hosts, tmp_path: Path) -> Iterator[Ssh]:
    with Ssh(getpass.getuser(), hosts.key, tmp_path / "known" / "known_hosts", hosts.port) as made:
        yield made


@pytest.fixture(autouse=True)
def bare(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test finds hosts with nothing in their homes. (Links in there are removed, never followed.)"""
    made: Hosts | None = request.getfixturevalue("hosts") if "hosts" in request.fixturenames else None
    yield
    if made is not None:
        for address in made.addresses:
            shutil.rmtree(made.home(address), ignore_errors=True)
            made.home(address).mkdir(exist_ok=True)

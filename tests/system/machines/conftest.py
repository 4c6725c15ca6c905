"""Four hosts of one sshd on loopback, a connection to them, and a cluster whose Ray and head are doubles."""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from pathlib import Path

import pytest

from odmoe.machines.ssh import Ssh
from odmoe.stores import prepare_store
from support.machines.pretended_cluster import PretendedCluster, pretend
from support.machines.ssh_hosts import SshHosts, serve_hosts


@pytest.fixture(scope="session")
def served_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with serve_hosts(tmp_path_factory.mktemp("sshd")) as made:
        yield made


@pytest.fixture
def hosts(served_hosts: SshHosts) -> Iterator[SshHosts]:
    """Hosts with nothing in their homes."""
    yield served_hosts
    served_hosts.empty()


@pytest.fixture
def ssh(hosts: SshHosts, tmp_path: Path) -> Iterator[Ssh]:
    with Ssh(getpass.getuser(), hosts.key, tmp_path / "known" / "known_hosts", hosts.port) as made:
        yield made


@pytest.fixture(scope="session")
def tiny_store(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An expert store of the tiny model, which no test changes."""
    return prepare_store(str(tiny), str(tmp_path_factory.mktemp("stores") / "tiny"), None).path


@pytest.fixture
def world(
    hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_store: Path
) -> Iterator[PretendedCluster]:
    made = pretend(hosts, tmp_path, tiny_store, monkeypatch)
    yield made
    made.terminal.console.file.close()

"""Keys and stores as they lie on the hosts, over a real sshd.

Takes about 15 s on two idle cores.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import shutil
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from checkpoint.sharding.form_files import add_forms
from checkpoint.store import ExpertStore
from odmoe.machines import ship
from odmoe.machines.cluster_file import Host
from odmoe.machines.preflight import probe
from odmoe.machines.ship import push_keys, push_store
from odmoe.machines.ssh import Ssh
from scheduler.errors import ConfigError, HostError
from support.machines.ssh_hosts import SshHosts

pytestmark = pytest.mark.system


@pytest.fixture
def keys(hosts: SshHosts, tmp_path: Path) -> Path:
    folder = tmp_path / "cluster"
    for name in [*ship.CLUSTER_KEYS, "ca.key", "known_hosts"]:
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"{name} of all")
    for address in hosts.addresses:
        (folder / address).mkdir()
        for name in ship.NODE_KEYS:
            (folder / address / name).write_text(f"{name} of {address}")
    return folder


def test_each_host_gets_its_own_keys_and_no_other(hosts: SshHosts, ssh: Ssh, keys: Path) -> None:
    there = hosts.home(hosts.addresses[1]) / "odmoe" / "keys"
    there.mkdir(parents=True)
    there.chmod(0o755)
    machine = Host("shadow_node", 0, hosts.addresses[1])
    for _ in range(2):
        push_keys(ssh, machine, keys)
        own = {name: f"{name} of {machine.address}" for name in ship.NODE_KEYS}
        assert {p.name: p.read_text() for p in there.iterdir()} == own | {
            name: f"{name} of all" for name in ship.CLUSTER_KEYS
        }
        assert stat.S_IMODE(there.stat().st_mode) == 0o700
        assert {stat.S_IMODE(p.stat().st_mode) for p in there.iterdir()} == {0o600}
        (keys / "secret").write_text("secret of all")


def test_a_key_that_was_not_made_is_named(hosts: SshHosts, ssh: Ssh, keys: Path) -> None:
    (keys / hosts.addresses[0] / "node.pem").unlink()
    with pytest.raises(ConfigError, match=r"127.0.99.1/node.pem is not there, to be copied to main"):
        push_keys(ssh, hosts.host, keys)


@pytest.fixture
def store(tiny_store: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model's store, to change."""
    return Path(shutil.copytree(tiny_store, tmp_path / "tiny-store"))


@pytest.fixture
def machines(hosts: SshHosts) -> list[Host]:
    return [Host("worker_node", n, address) for n, address in enumerate(hosts.addresses)]


def facts_of(ssh: Ssh, machines: list[Host]) -> dict[str, Any]:
    return {host.address: probe(ssh, host) for host in machines}


def digest(folder: Path) -> dict[str, str]:
    files = [p for p in folder.rglob("*") if p.is_file()]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_a_store_on_every_host_and_only_where_it_is_not(
    hosts: SshHosts, ssh: Ssh, store: Path, machines: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, tuple[int, int]] = {}
    note = lambda host, *at: seen.update({host: at})  # noqa: E731
    assert push_store(ssh, machines, store, facts_of(ssh, machines), note) == {}
    size = sum(p.stat().st_size for p in store.rglob("*") if p.is_file())
    assert seen == {host.name: (size, size) for host in machines}
    for address in hosts.addresses:
        there = hosts.home(address) / "odmoe" / "stores" / store.name
        assert digest(there) == digest(store)
        ExpertStore.open(there).verify()
    facts = facts_of(ssh, machines)
    found = facts[hosts.addresses[0]]["stores"][store.name]
    manifest = ExpertStore.open(store).manifest
    assert (found["fingerprint"], found["dtype"], found["fault"]) == (manifest.fingerprint, manifest.dtype, None)
    pushed: list[str] = []
    monkeypatch.setattr(Ssh, "push", lambda self, host, *rest, **how: pushed.append(host.address))
    assert push_store(ssh, machines, store, facts) == {}
    assert pushed == []
    layer = hosts.home(hosts.addresses[2]) / "odmoe" / "stores" / store.name / "layer-00000.experts"
    os.truncate(layer, 4096)
    assert push_store(ssh, machines, store, facts_of(ssh, machines)) == {}
    assert pushed == [hosts.addresses[2]]


def test_a_form_that_the_store_got_since_is_copied_too(
    hosts: SshHosts, ssh: Ssh, store: Path, machines: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert push_store(ssh, machines[:1], store, facts_of(ssh, machines[:1])) == {}
    add_forms(ExpertStore.open(store), ["int4"])
    assert push_store(ssh, machines[:1], store, facts_of(ssh, machines[:1])) == {}
    there = hosts.home(hosts.addresses[0]) / "odmoe" / "stores" / store.name
    assert digest(there) == digest(store)
    assert list(ExpertStore.open(there).manifest.forms) == ["int4"]
    pushed: list[str] = []
    monkeypatch.setattr(Ssh, "push", lambda self, host, *rest, **how: pushed.append(host.address))
    assert push_store(ssh, machines[:1], store, facts_of(ssh, machines[:1])) == {}
    assert pushed == []
    os.truncate(there / "layer-00000.int4", 4096)
    assert push_store(ssh, machines[:1], store, facts_of(ssh, machines[:1])) == {}
    assert pushed == [hosts.addresses[0]]


def test_an_interrupted_copy_is_no_store_and_is_taken_up_again(
    hosts: SshHosts, ssh: Ssh, store: Path, machines: list[Host], tmp_path: Path
) -> None:
    """Another model's store was there under this name; the connections end in the middle of a large file."""
    there = hosts.home(hosts.addresses[0]) / "odmoe" / "stores" / store.name
    shutil.copytree(store, there)
    (there / "manifest.json").write_text((there / "manifest.json").read_text().replace('"format"', ' "format"'))
    (there / "stranger").write_text("x")
    with (store / "dense" / "large").open("wb") as large:
        large.write(os.urandom(1 << 20) * 200)
    facts = facts_of(ssh, machines[:1])
    cut = Ssh(getpass.getuser(), hosts.key, tmp_path / "known_hosts", hosts.port)

    def step(host: str, done: int, _: int) -> None:
        if done > 1 << 20:
            threading.Thread(target=cut.close).start()

    failed = push_store(cut, machines[:1], store, facts, step)
    assert list(failed) == [hosts.addresses[0]]
    assert isinstance(failed[hosts.addresses[0]], HostError)
    assert not (there / "manifest.json").exists()
    facts = facts_of(ssh, machines[:1])
    assert facts[hosts.addresses[0]]["stores"] == {}
    assert push_store(ssh, machines[:1], store, facts) == {}
    assert digest(there) == digest(store)

"""The code's archive as tar and make see it; keys and stores as they lie on the hosts."""

from __future__ import annotations

import getpass
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from checkpoint.sharding.form_files import add_forms
from checkpoint.store import ExpertStore
from odmoe.machines import ship
from odmoe.machines.cluster_file import Host
from odmoe.machines.preflight import probe
from odmoe.machines.ship import code_archive, code_digest, push_keys, push_store
from odmoe.machines.ssh import Ssh
from odmoe.stores import prepare_store
from scheduler.errors import ConfigError, HostError
from support.paths import ROOT


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project in place of this one."""
    root = tmp_path / "project"
    for name in (*ship.PACKAGES, "deploy", "tests", "odmoe/profiles", "odmoe/__pycache__"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in (*ship.FILES, "deploy/env.sh", "tests/t.py", "odmoe/profiles/a.yaml", "odmoe/__pycache__/x.pyc"):
        (root / name).write_text(f"# {name}\n")
    for name in ship.PACKAGES:
        (root / name / "__init__.py").write_text("")
    (root / "odmoe" / ".hidden").write_text("x")
    monkeypatch.setattr(ship, "ROOT", root)
    return root


def unpacked(archive: Path, to: Path) -> Path:
    to.mkdir()
    subprocess.run(["tar", "-xzf", archive, "-C", to], check=True, timeout=30)
    return to


def test_the_archive_holds_the_project_and_says_what_it_is(project: Path, tmp_path: Path) -> None:
    digest = code_archive(tmp_path / "new" / "code.tar.gz")
    there = unpacked(tmp_path / "new" / "code.tar.gz", tmp_path / "there")
    found = {str(p.relative_to(there)) for p in there.rglob("*") if p.is_file()}
    packages = {f"{name}/__init__.py" for name in ship.PACKAGES}
    assert found == packages | set(ship.FILES) | {"odmoe/profiles/a.yaml", "env.sh", "SHIPPED"}
    assert (there / "env.sh").read_text() == "# deploy/env.sh\n"
    assert (there / "SHIPPED").read_text().strip() == digest == code_digest()
    assert ship.shipped(tmp_path / "new" / "code.tar.gz") == digest
    for name in found - {"SHIPPED", "env.sh"}:
        assert (there / name).read_bytes() == (project / name).read_bytes()


def test_the_same_sources_make_the_same_bytes_and_leave_the_file_alone(project: Path, tmp_path: Path) -> None:
    archive = tmp_path / "code.tar.gz"
    digest = code_archive(archive)
    before, data = archive.stat(), archive.read_bytes()
    assert code_archive(archive) == digest
    assert (archive.stat().st_ino, archive.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    again = tmp_path / "again" / "code.tar.gz"
    time.sleep(1.1)
    assert code_archive(again) == digest
    assert again.read_bytes() == data
    assert [path.name for path in again.parent.iterdir()] == ["code.tar.gz"]


@pytest.mark.parametrize("change", ["content", "name", "mode"])
def test_other_sources_have_another_digest(project: Path, tmp_path: Path, change: str) -> None:
    archive = tmp_path / "code.tar.gz"
    digest = code_archive(archive)
    data, file = archive.read_bytes(), project / "wire" / "__init__.py"
    if change == "content":
        file.write_text("x = 1\n")
    elif change == "name":
        file.rename(file.with_name("other.py"))
    else:
        file.chmod(0o755)
    assert code_archive(archive) != digest
    assert archive.read_bytes() != data


def test_a_copy_written_at_another_time_is_the_same_code(project: Path) -> None:
    digest = code_digest()
    for path in project.rglob("*"):
        os.utime(path, (1, 1))
    assert code_digest() == digest


def test_make_has_nothing_to_do_in_an_environment_made_after_the_sources(project: Path, tmp_path: Path) -> None:
    """make itself says so, with the Makefile of this project, on what tar has unpacked later."""
    shutil.copy(ROOT / "Makefile", project / "Makefile")
    for name in ship.FILES:
        os.utime(project / name, (time.time() - 100,) * 2)
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for name in (".locked", ".installed"):
        (venv / name).touch()
        os.utime(venv / name, (time.time() - 50,) * 2)
    code_archive(tmp_path / "code.tar.gz")
    there = unpacked(tmp_path / "code.tar.gz", tmp_path / "there")
    command = ["make", "-q", "-C", str(there), f"{venv}/.installed", f"VENV={venv}"]
    assert subprocess.run(command, timeout=30, capture_output=True).returncode == 0
    (there / "requirements.lock").touch()
    assert subprocess.run(command, timeout=30, capture_output=True).returncode == 1


def test_a_project_that_is_not_whole_is_named(project: Path, tmp_path: Path) -> None:
    (project / "requirements.lock").unlink()
    with pytest.raises(ConfigError, match=r"project/requirements.lock cannot be read .*run odmoe from a checkout"):
        code_archive(tmp_path / "code.tar.gz")
    assert not (tmp_path / "code.tar.gz").exists()


def test_this_project_runs_from_its_archive(tmp_path: Path) -> None:
    """With the environment that env.sh sets, and nothing of this checkout; from there it could be sent on."""
    digest = code_archive(tmp_path / "code.tar.gz")
    (tmp_path / "odmoe").mkdir()
    unpacked(tmp_path / "code.tar.gz", tmp_path / "odmoe" / "code")
    os.symlink(sys.prefix, tmp_path / "odmoe" / "venv")
    script = (
        '. ~/odmoe/code/env.sh && python -c "import odmoe.machines.ship, os; print(odmoe.machines.ship.code_digest());'
        " print(os.environ['RAY_AUTH_MODE'], os.environ.get('OMP_NUM_THREADS'), os.environ['ODMOE_TLS'])\""
    )
    done = subprocess.run(
        ["sh", "-c", script], cwd="/", env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.split() == [digest, "token", "None", f"{tmp_path}/odmoe/keys"], done.stderr


@pytest.fixture
def keys(hosts: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "cluster"
    for name in [*ship.CLUSTER_KEYS, "ca.key", "known_hosts"]:
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"{name} of all")
    for address in hosts.addresses:
        (folder / address).mkdir()
        for name in ship.NODE_KEYS:
            (folder / address / name).write_text(f"{name} of {address}")
    return folder


def test_each_host_gets_its_own_keys_and_no_other(hosts: Any, ssh: Ssh, keys: Path) -> None:
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


def test_a_key_that_was_not_made_is_named(hosts: Any, ssh: Ssh, keys: Path) -> None:
    (keys / hosts.addresses[0] / "node.pem").unlink()
    with pytest.raises(ConfigError, match=r"127.0.99.1/node.pem is not there, to be copied to main"):
        push_keys(ssh, hosts.host, keys)


@pytest.fixture
def store(tiny: Path, tmp_path: Path) -> Path:
    return prepare_store(str(tiny), str(tmp_path / "tiny-store"), None).path


@pytest.fixture
def machines(hosts: Any) -> list[Host]:
    return [Host("worker_node", n, address) for n, address in enumerate(hosts.addresses)]


def facts_of(ssh: Ssh, machines: list[Host]) -> dict[str, Any]:
    return {host.address: probe(ssh, host) for host in machines}


def digest(folder: Path) -> dict[str, str]:
    files = [p for p in folder.rglob("*") if p.is_file()]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_a_store_on_every_host_and_only_where_it_is_not(
    hosts: Any, ssh: Ssh, store: Path, machines: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    assert push_store(ssh, machines, store, facts_of(ssh, machines), lambda *at: seen.append(at)) == {}
    size = sum(p.stat().st_size for p in store.rglob("*") if p.is_file())
    assert seen[-1] == (size * len(machines), size * len(machines))
    for address in hosts.addresses:
        there = hosts.home(address) / "odmoe" / "stores" / store.name
        assert digest(there) == digest(store)
        ExpertStore.open(there).verify()
    facts = facts_of(ssh, machines)
    said = facts[hosts.addresses[0]]["stores"][store.name]
    manifest = ExpertStore.open(store).manifest
    assert (said["fingerprint"], said["dtype"], said["fault"]) == (manifest.fingerprint, manifest.dtype, None)
    pushed: list[str] = []
    monkeypatch.setattr(Ssh, "push", lambda self, host, *rest, **how: pushed.append(host.address))
    assert push_store(ssh, machines, store, facts) == {}
    assert pushed == []
    layer = hosts.home(hosts.addresses[2]) / "odmoe" / "stores" / store.name / "layer-00000.experts"
    os.truncate(layer, 4096)
    assert push_store(ssh, machines, store, facts_of(ssh, machines)) == {}
    assert pushed == [hosts.addresses[2]]


def test_a_form_that_the_store_got_since_is_copied_too(
    hosts: Any, ssh: Ssh, store: Path, machines: list[Host], monkeypatch: pytest.MonkeyPatch
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
    hosts: Any, ssh: Ssh, store: Path, machines: list[Host], tmp_path: Path
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

    def step(done: int, _: int) -> None:
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

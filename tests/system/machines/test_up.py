"""`odmoe up` over a real sshd, with real copies; Ray and the head's program are doubles.

Every `up` asks four hosts, and copies keys, code and a store to them: that is what takes time here.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoint.store import ExpertStore
from odmoe.machines.certs import ensure_certs
from odmoe.machines.down import down
from odmoe.machines.home import cluster_dir, only_one
from odmoe.machines.owners.claims import launcher
from odmoe.machines.preflight import probe
from odmoe.machines.ship import code_archive, code_digest
from odmoe.machines.ssh import Ssh
from odmoe.machines.status import status
from odmoe.machines.up import up
from odmoe.settings.settings import Settings
from odmoe.terminal import Terminal
from scheduler.errors import CheckpointError, ConfigError, CorruptStoreError, LaunchError
from support.machines.pretended_cluster import PretendedCluster

pytestmark = pytest.mark.system


def test_from_nothing_to_ready(world: PretendedCluster) -> None:
    waiting, ready = ["starting"] * 4, ["ready"] * 4
    world.head(
        start=[
            (0.1, world.line(*waiting)),
            (0.3, world.line("ready", "starting", "ready", "ready")),
            (0.1, world.line(*ready, ready=True)),
        ]
    )
    up(world.file, world.settings, world.terminal)
    stderr = world.stderr()
    ((request, tls, token),) = world.requests()
    assert request == {"do": "start", "settings": {"shadow": "nf4", "slots": 2}, "store": "~/odmoe/stores/tiny"}
    for number, host in enumerate(world.cluster.hosts):
        home = world.home(number)
        ExpertStore.open(home / "odmoe" / "stores" / "tiny").verify()
        keys = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (home / "odmoe" / "keys").iterdir()}
        assert keys == dict.fromkeys(("ca.pem", "node.pem", "node.key", "secret", "ray_token"), 0o600)
        assert f"{host.name} ({host.address}) ready" in stderr
    assert (tls, token) == (f"{world.home(0)}/odmoe/keys", f"{world.home(0)}/odmoe/keys/ray_token")
    folder = cluster_dir("odmoe-test")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "ray_token").stat().st_mode) == 0o600
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("ready in ")
    parts = [float(part.split()[-1]) for part in last.partition(": ")[2].split(", ")]
    assert sum(parts) == pytest.approx(float(last.split()[2]), abs=0.4)
    assert [word for word in ("preflight", "keys", "store", "ray up", "nodes") if word not in last] == []


def test_workers_get_their_parts(world: PretendedCluster) -> None:
    """One replica: the two workers share the experts. Then two: each gets the other's, while its files stay open."""
    world.head(start=[(0, world.ready())], status=[(0, world.ready())])
    text = world.file.read_text()
    world.file.write_text(text.replace("  hosts:", "  replicas: 1\n  hosts:"))
    up(world.file, world.settings, world.terminal)
    stores = [ExpertStore.open(world.home(number) / "odmoe" / "stores" / "tiny") for number in range(4)]
    for store in stores:
        store.verify()
    assert [store.held is None for store in stores] == [True, True, False, False]
    one, other = (store.held or frozenset() for store in stores[2:])
    assert not one & other
    assert len(one | other) == sum(len(layer.blobs) for layer in stores[0].manifest.layers.values())
    assert not stores[2].dense.exists()
    files = [file for store in stores[2:] for file in store.path.glob("*.experts")]
    log = cluster_dir("odmoe-test") / "ray-up.log"
    log.unlink()
    inodes = [file.stat().st_ino for file in files]
    world.file.write_text(text.replace("  hosts:", "  replicas: 2\n  hosts:"))
    up(world.file, world.settings, world.terminal)
    assert [file.stat().st_ino for file in files] == inodes
    for store in map(ExpertStore.open, (stores[2].path, stores[3].path)):
        assert store.held == one | other
        store.verify()
    assert not log.exists()  # what runs goes on


def test_a_damaged_store_and_another_are_replaced_when_nothing_reads_it(world: PretendedCluster) -> None:
    world.head(start=[(0, world.ready())], status=[(0, world.ready())])
    world.file.write_text(world.file.read_text().replace("  hosts:", "  replicas: 1\n  hosts:"))
    up(world.file, world.settings, world.terminal)
    folders = [world.home(number) / "odmoe" / "stores" / "tiny" for number in range(4)]
    os.truncate(min(folders[0].glob("*.experts")), 4096)
    other = folders[2] / "manifest.json"
    other.write_text(other.read_text().replace('"format"', ' "format"'))
    before = {file: file.stat().st_ino for folder in folders for file in folder.iterdir()}
    with pytest.raises(LaunchError, match="2 of 4 hosts cannot be given the store: main, worker-0; each is explained"):
        up(world.file, world.settings, world.terminal)
    said = world.stderr()
    assert "main (127.0.99.1): its store tiny is damaged (" in said
    assert "worker-0 (127.0.99.3): its store tiny is another one, or has other forms, and it runs here: " in said
    assert "and it runs here: " in said
    assert f"odmoe down {world.file} ends that" in said
    assert {file: file.stat().st_ino for file in before} == before
    down(world.file, world.terminal)
    up(world.file, world.settings, world.terminal)
    for folder in folders:
        ExpertStore.open(folder).verify()


def test_what_runs_is_left_alone(world: PretendedCluster) -> None:
    ready = world.ready()
    world.head(start=[(0, ready)], status=[(0, ready)])
    up(world.file, world.settings, world.terminal)
    log = cluster_dir("odmoe-test") / "ray-up.log"
    assert log.read_text().startswith("up -y --no-config-cache")
    log.unlink()
    digest = code_digest()
    for number in range(4):  # the doubles have put a file of their own there
        assert (world.home(number) / "odmoe" / "code" / "SHIPPED").read_text().strip() == digest
    up(world.file, world.settings, world.terminal)
    assert not log.exists()
    assert [request["do"] for request, *_ in world.requests()] == ["start", "status", "start"]
    (world.home(2) / "odmoe" / "code" / "SHIPPED").write_text("other\n")
    up(world.file, world.settings, world.terminal)
    assert log.exists()


def launched_again(world: PretendedCluster) -> bool:
    log = cluster_dir("odmoe-test") / "ray-up.log"
    log.unlink(missing_ok=True)
    up(world.file, world.settings, world.terminal)
    return log.exists()


def test_a_file_that_has_changed_is_launched_again(world: PretendedCluster) -> None:
    """The addresses are the same: two hosts change places, one gets a setting, groups are made, Ray another port. New
    certificates reach nodes that run, too."""
    ready = world.ready()
    world.head(start=[(0, ready)], status=[(0, ready)])
    assert launched_again(world)
    text = world.file.read_text()
    workers = "[127.0.99.3, 127.0.99.4]"
    for changed in (
        text.replace(workers, "[127.0.99.4, 127.0.99.3]"),
        text.replace(workers, f"[{workers}]"),
        text.replace(workers, "[127.0.99.3, {host: 127.0.99.4, slots: 3}]"),
        text + "worker_start_ray_commands: [ray start --port=1]\n",
    ):
        world.file.write_text(changed)
        assert launched_again(world), changed
    assert not launched_again(world)
    hosts = [(host.name, host.address) for host in world.cluster.hosts]
    ensure_certs(cluster_dir("odmoe-test"), hosts, renew=True)
    assert launched_again(world)
    assert not launched_again(world)


def test_a_host_that_leaves_the_file_is_ended(world: PretendedCluster) -> None:
    """Unless another cluster has it by then."""
    ready = world.ready()
    world.head(start=[(0, ready)])
    up(world.file, world.settings, world.terminal)
    claim = world.home(3) / "odmoe" / "owner.json"
    ours = claim.read_text()
    text = world.file.read_text()
    world.file.write_text(text.replace(", 127.0.99.4", ""))
    claim.write_text(json.dumps(json.loads(ours) | {"id": "another"}))
    up(world.file, world.settings, world.terminal)
    assert "is no longer in" not in world.stderr()
    assert processes_of(world, 3)
    claim.write_text(ours)
    world.file.write_text(text)
    world.head(start=[(0, ready)])
    up(world.file, world.settings, world.terminal)
    world.file.write_text(text.replace(", 127.0.99.4", ""))
    down(world.file, world.terminal)
    assert f"127.0.99.4 is no longer in {world.file}: ended sleep" in world.stderr()
    assert not processes_of(world, 3)
    assert not claim.exists()


def processes_of(world: PretendedCluster, number: int) -> list[str]:
    with Ssh.for_cluster(world.cluster, world.base) as ssh:
        return list(probe(ssh, world.cluster.hosts[number])["processes"])


def other_cluster(world: PretendedCluster, patch: pytest.MonkeyPatch) -> Path:
    """A file of the same hosts, of another person, who has launched nothing yet."""
    patch.setenv("XDG_CONFIG_HOME", str(world.base / "other-config"))
    file = world.base / "other.yaml"
    file.write_text(world.file.read_text().replace("odmoe-test", "office"))
    return file


def contents(world: PretendedCluster) -> dict[str, bytes]:
    """What a host has of a cluster, but its stores."""
    found = {}
    for number in range(4):
        folder = world.home(number) / "odmoe"
        for path in (*folder.glob("keys/*"), folder / "owner.json", folder / "code" / "SHIPPED"):
            found[str(path)] = path.read_bytes()
    return found


def test_another_file_of_the_same_hosts_changes_nothing(
    world: PretendedCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not with a wrong model, not with a right one; `down` and `status` of it neither. All name the owner."""
    world.head(start=[(0, world.ready())], status=[(0, world.ready())])
    up(world.file, world.settings, world.terminal)
    before = contents(world)
    with monkeypatch.context() as patch:
        file = other_cluster(world, patch)
        settings = world.settings.replace(cluster=str(file))
        with pytest.raises(CheckpointError):
            up(file, settings.replace(model=str(world.base / "none")), world.terminal)
        with pytest.raises(LaunchError, match="4 of 4 hosts not fit"):
            up(file, settings, world.terminal)
        owner = f"it belongs to the cluster odmoe-test of {launcher()} ({world.file})"
        assert world.stderr().count(owner) == 4
        with pytest.raises(LaunchError, match="4 of 4 hosts belong to another cluster"):
            down(file, world.terminal)
        assert world.stderr().count(f"left alone: {owner}") == 4
        assert not status(file)
        said = capsys.readouterr().out.splitlines()
        assert [line.split()[2] for line in said[1:5]] == ["occupied"] * 4
        assert all(owner in line for line in said[1:5])
        assert said[5].startswith("head: LaunchError: main (127.0.99.1) belongs to the cluster odmoe-test of ")
    assert contents(world) == before
    assert status(world.file)
    assert all(processes_of(world, number) for number in range(4))


def test_hosts_are_taken_over_only_when_asked_for(world: PretendedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    world.head(start=[(0, world.ready())])
    up(world.file, world.settings, world.terminal)
    before = contents(world)
    with monkeypatch.context() as patch:
        file = other_cluster(world, patch)
        code_archive(cluster_dir("office") / "code.tar.gz")  # the double of `ray up` writes the first cluster's
        up(file, world.settings.replace(cluster=str(file)), world.terminal, take_over=True)
    assert f"main (127.0.99.1): taken from the cluster odmoe-test of {launcher()}" in world.stderr()
    assert all(contents(world)[path] != content for path, content in before.items() if path.endswith("ray_token"))
    with pytest.raises(LaunchError, match="4 of 4 hosts belong to another cluster"):
        down(world.file, world.terminal)
    assert all(processes_of(world, number) for number in range(4))


def test_two_files_of_one_name(world: PretendedCluster) -> None:
    """Their hosts differ: the first's would be taken for hosts that left the file."""
    world.head(start=[(0, world.ready())])
    up(world.file, world.settings, world.terminal)
    second = world.base / "second.yaml"
    second.write_text(world.file.read_text().replace(", 127.0.99.4", ""))
    for work in (lambda: up(second, world.settings, world.terminal), lambda: down(second, world.terminal)):
        with pytest.raises(LaunchError, match=f"runs from {world.file}, which has other hosts than {second}"):
            work()
    assert processes_of(world, 3)
    moved = world.file.rename(world.base / "moved.yaml")
    down(moved, world.terminal)
    assert not processes_of(world, 3)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("_fit", "no host was changed"),
        ("_push_keys", "no node was changed. The hosts are claimed, and have some of the copies; odmoe down"),
        ("_nodes", "Ray and the nodes go on starting, or running, on the hosts; odmoe down"),
    ],
)
def test_what_goes_on_after_an_interrupt(
    world: PretendedCluster, monkeypatch: pytest.MonkeyPatch, step: str, said: str
) -> None:
    world.head(start=[(0, world.ready())])

    def interrupt(self: Any, *_: Any) -> None:
        self._ssh.close()  # as Ctrl-C does while hosts are asked
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"odmoe.machines.up._BringUp.{step}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            up(world.file, world.settings, world.terminal)
    assert said in world.stderr()
    claim = world.home(0) / "odmoe" / "owner.json"
    assert claim.exists() == (step != "_fit")
    if claim.exists():
        assert json.loads(claim.read_text())["launching"] is False
    up(world.file, world.settings, world.terminal)


def test_an_up_that_fails_before_ray_leaves_what_runs(world: PretendedCluster) -> None:
    """Settings that do not go with the model, a model that is not there, a host without room."""
    world.head(start=[(0, world.ready())], status=[(0, world.ready())])
    up(world.file, world.settings, world.terminal)
    before, running = contents(world), [processes_of(world, number) for number in range(4)]
    for changes, kind in (
        ({"model": str(world.base / "none")}, CheckpointError),
        ({"slots": 1, "system": "fully-cached"}, ConfigError),
        ({"predictor": "token-wise"}, ConfigError),
    ):
        with pytest.raises(kind):
            up(world.file, world.settings.replace(**changes), world.terminal)
    world.hosts.give_old_python(2)
    with pytest.raises(LaunchError, match="1 of 4 hosts not fit: worker-0"):
        up(world.file, world.settings, world.terminal)
    (world.home(2) / "bin" / "python3").unlink()
    assert contents(world) == before
    assert [processes_of(world, number) for number in range(4)] == running


def test_one_at_a_time(world: PretendedCluster) -> None:
    with only_one(cluster_dir("odmoe-test")):
        for work in (lambda: up(world.file, world.settings, world.terminal), lambda: down(world.file, world.terminal)):
            with pytest.raises(LaunchError, match="another odmoe up or down of the cluster odmoe-test is at work"):
                work()
    with only_one(cluster_dir("odmoe-test")):
        pass


def test_quiet_still_says_what_is_wrong(world: PretendedCluster, capsys: pytest.CaptureFixture[str]) -> None:
    world.file.write_text(world.file.read_text().replace("127.0.99.4", "127.0.98.4"))
    for work in (
        lambda: up(world.file, world.settings, Terminal(quiet=True)),
        lambda: down(world.file, Terminal(quiet=True)),
    ):
        with pytest.raises(LaunchError, match="1 of 4 hosts"):
            work()
        stderr = capsys.readouterr().err
        assert "worker-1 (127.0.98.4): " in stderr
        assert len(stderr.splitlines()) == 1


def test_a_store_named_by_where_one_stands(world: PretendedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-m .` is a store without a name; the other stores of a host stay."""
    world.head(start=[(0, world.ready())])
    other = world.home(1) / "odmoe" / "stores" / "other"
    other.mkdir(parents=True)
    monkeypatch.chdir(world.store)
    up(world.file, world.settings.replace(model="."), world.terminal)
    assert other.is_dir()
    assert world.requests()[0][0]["store"] == "~/odmoe/stores/tiny"


def test_every_host_that_is_not_fit_is_named_and_nothing_is_begun(world: PretendedCluster) -> None:
    text = world.file.read_text().replace("127.0.99.2", "127.0.98.2")
    world.file.write_text(text)
    (world.home(3) / "odmoe" / "venv").unlink()
    site = world.home(3) / "odmoe" / "venv" / "lib" / "python3.11" / "site-packages"
    (site / "torch-2.0.0.dist-info").mkdir(parents=True)
    (world.home(3) / "odmoe" / "venv" / "bin").mkdir()
    os.symlink(sys.executable, world.home(3) / "odmoe" / "venv" / "bin" / "python")
    (world.home(3) / "odmoe" / "venv" / "pyvenv.cfg").write_text("version = 3.11.2\n")
    (world.home(3) / "odmoe" / "venv" / ".locked").touch()
    with pytest.raises(LaunchError, match="2 of 4 hosts not fit: shadow, worker-1; each is explained above"):
        up(world.file, world.settings, world.terminal)
    assert "shadow (127.0.98.2): ssh is refused" in world.stderr()
    assert "worker-1 (127.0.99.4): other versions in ~/odmoe/venv: torch 2.0.0" in world.stderr()
    assert not (world.home(0) / "odmoe" / "keys").exists()


def test_a_ray_up_that_fails_tells_why(world: PretendedCluster) -> None:
    (world.base / "ray-fails").touch()
    with pytest.raises(
        LaunchError,
        match=r"ray up ended with exit code 1: NodeUpdater: 127.0.99.9: something refused; "
        r"see .*/odmoe-test/ray-up.log",
    ):
        up(world.file, world.settings, world.terminal)


def test_an_error_of_the_head_comes_out_with_the_hosts_that_are_behind(world: PretendedCluster) -> None:
    error = {"type": "CorruptStoreError", "message": "expert 3 of layer 0 fails its checksum"}
    world.head(
        start=[
            (0.1, world.line("ready", "ready", "ready", "starting")),
            (
                0.1,
                world.line(
                    "ready",
                    "ready",
                    "ready",
                    "failed",
                    error=error,
                    **{"worker-1": {"detail": "the store's expert 3 is damaged"}},
                ),
            ),
        ]
    )
    with pytest.raises(CorruptStoreError, match="expert 3 of layer 0"):
        up(world.file, world.settings, world.terminal)
    assert "worker-1 (127.0.99.4) failed: the store's expert 3 is damaged" in world.stderr()


def test_it_never_waits_without_a_bound_and_says_who_is_behind(world: PretendedCluster) -> None:
    """One that Ray has not seen, one that was not heard of, one that still starts; the head goes on talking."""
    logs = Path("/tmp/ray/session_latest/logs")
    line = world.line(
        "ready",
        "waiting",
        "lost",
        "starting",
        **{"shadow": {"ray": "missing"}, "worker-0": {"heartbeat_s": 71.0}, "worker-1": {"detail": "reads the store"}},
    )
    world.head(start=[(0.2, line)] * 3000)
    with pytest.raises(LaunchError, match="not ready within 12 s; not ready: shadow, worker-0, worker-1; odmoe status"):
        up(world.file, world.settings, world.terminal, timeout_s=12)
    stderr = world.stderr()
    assert "shadow (127.0.99.2): Ray is missing there" in stderr
    assert "worker-0 (127.0.99.3): no heartbeat for 71 s" in stderr
    assert "worker-1 (127.0.99.4): reads the store" in stderr
    assert not logs.exists() or "Ray's launcher says" not in stderr


@pytest.mark.parametrize("script", [[], [(30.0, {})]])
def test_a_head_that_says_nothing(world: PretendedCluster, monkeypatch: pytest.MonkeyPatch, script: Any) -> None:
    monkeypatch.setattr("odmoe.machines.head.IDLE_S", 2.0)
    world.head(start=script)
    what = "nothing was heard for 2 s" if script else "the head stopped before all was ready"
    with pytest.raises(LaunchError, match=what):
        up(world.file, world.settings, world.terminal)


def test_without_a_model(world: PretendedCluster) -> None:
    with pytest.raises(ConfigError, match="--model is not given"):
        up(world.file, Settings(), world.terminal)

"""`odmoe up` over a real sshd, with real copies; Ray and the head's program are doubles.

Takes about 100 s on two idle cores: every `up` asks four hosts and copies keys, code and a store to them.
"""

from __future__ import annotations

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
from odmoe.machines.ship import code_digest
from odmoe.machines.up import up
from odmoe.settings.settings import Settings
from odmoe.terminal import Terminal
from scheduler.errors import ConfigError, CorruptStoreError, LaunchError
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
    """The addresses are the same: two hosts change places, one gets a setting, groups are made, Ray another port."""
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
        assert not launched_again(world), changed


def test_new_certificates_reach_nodes_that_run(world: PretendedCluster) -> None:
    ready = world.ready()
    world.head(start=[(0, ready)], status=[(0, ready)])
    assert launched_again(world)
    assert not launched_again(world)
    hosts = [(host.name, host.address) for host in world.cluster.hosts]
    ensure_certs(cluster_dir("odmoe-test"), hosts, renew=True)
    assert launched_again(world)
    assert not launched_again(world)


def test_a_host_that_leaves_the_file_is_ended(world: PretendedCluster) -> None:
    """Unless it has another cluster's token by then."""
    ready = world.ready()
    world.head(start=[(0, ready)])
    up(world.file, world.settings, world.terminal)
    token = world.home(3) / "odmoe" / "keys" / "ray_token"
    ours = token.read_text()
    text = world.file.read_text()
    world.file.write_text(text.replace(", 127.0.99.4", ""))
    token.write_text("another's")
    up(world.file, world.settings, world.terminal)
    assert "is no longer in" not in world.stderr()
    world.file.write_text(text)
    world.head(start=[(0, ready)])
    up(world.file, world.settings, world.terminal)
    assert token.read_text() == ours
    world.file.write_text(text.replace(", 127.0.99.4", ""))
    down(world.file, world.terminal)
    assert f"127.0.99.4 is no longer in {world.file}: ended sleep" in world.stderr()


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
    up(world.file, world.settings.but(model="."), world.terminal)
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

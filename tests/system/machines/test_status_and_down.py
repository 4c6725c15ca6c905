"""`odmoe status`, `odmoe down` and Ray's logs over a real sshd; Ray and the head's program are doubles.

Takes about 40 s on two idle cores.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable

import pytest
from cryptography.x509 import load_pem_x509_certificate

from odmoe.machines import ray_cli
from odmoe.machines.down import down
from odmoe.machines.home import cluster_dir
from odmoe.machines.owners.claims import launcher
from odmoe.machines.ssh import Ssh
from odmoe.machines.status import status
from odmoe.machines.up import up
from scheduler.errors import LaunchError
from support.machines.pretended_cluster import PretendedCluster
from support.machines.processes import wait_until

pytestmark = pytest.mark.system


def shown(capsys: pytest.CaptureFixture[str], call: Callable[[], bool]) -> tuple[bool, str]:
    capsys.readouterr()
    ready = call()
    return ready, capsys.readouterr().out


def test_status_of_what_is_ready_and_of_what_is_not(
    world: PretendedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = world.ready()
    world.head(start=[(0, ready)], status=[(0, ready)])
    up(world.file, world.settings, world.terminal)
    good, text = shown(capsys, lambda: status(world.file))
    assert good
    head, *rows, owner, certificate = text.splitlines()
    pem = (world.home(1) / "odmoe" / "keys" / "node.pem").read_bytes()
    end = f"{load_pem_x509_certificate(pem).not_valid_after_utc:%Y-%m-%d}"
    assert re.fullmatch(rf"certificate: all 4 hosts: until {end}, [\d,]+ days left", certificate)
    assert owner.startswith(f"owner: the cluster odmoe-test of {launcher()} ({world.file}), since 20")
    assert head.split()[:3] == ["host", "address", "state"]
    assert [row.split()[:4] for row in rows] == [[h.name, h.address, "ready", "alive"] for h in world.cluster.hosts]
    assert "2.00 GB/s" in rows[2]
    assert "123.4 MB" in rows[2]
    assert "0.31 ms" in rows[2]
    good, text = shown(capsys, lambda: status(world.file, as_json=True))
    found = json.loads(text)
    assert good
    assert found["ready"]
    assert [row["name"] for row in found["hosts"]] == [host.name for host in world.cluster.hosts]
    assert found["hosts"][2]["round_trip_s"] == 0.000312
    lost = world.line("ready", "ready", "lost", "ready", **{"worker-0": {"heartbeat_s": 80.0}})
    world.head(status=[(0, lost)])
    good, text = shown(capsys, lambda: status(world.file))
    assert not good
    assert "no heartbeat for 80 s" in text.splitlines()[3]


def test_status_half_broken(world: PretendedCluster, capsys: pytest.CaptureFixture[str]) -> None:
    """The head's code is not there, a host refuses ssh: rows all the same."""
    world.file.write_text(world.file.read_text().replace("127.0.99.4", "127.0.98.4"))
    good, text = shown(capsys, lambda: status(world.file, as_json=True))
    found = json.loads(text)
    assert not good
    assert [row["state"] for row in found["hosts"]] == ["down", "down", "down", "unreachable"]
    assert "ssh is refused" in found["hosts"][3]["detail"]
    assert found["error"]["message"].startswith("nothing runs on main (127.0.99.1); odmoe up ")


def test_status_after_down_is_down_although_the_head_is_being_asked(
    world: PretendedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    world.head(start=[(0, world.ready())])
    up(world.file, world.settings, world.terminal)
    down(world.file, world.terminal)
    error = {"type": "LaunchError", "message": "no Ray cluster at 'auto'"}
    world.head(status=[(3.0, {"hosts": [], "ready": False, "error": error})])
    _, text = shown(capsys, lambda: status(world.file))
    assert [line.split()[2:4] for line in text.splitlines()[1:5]] == [["down", "down"]] * 4
    assert text.splitlines()[5].startswith("head: LaunchError: nothing runs on main (127.0.99.1)")


def test_status_of_a_host_whose_python_is_too_old(world: PretendedCluster, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        world.hosts.give_old_python(number)
    good, text = shown(capsys, lambda: status(world.file))
    assert not good
    assert text.splitlines()[1].split()[:3] == ["main", "127.0.99.1", "unfit"]
    with pytest.raises(LaunchError, match="4 of 4 hosts may still run something"):
        down(world.file, world.terminal)


def test_status_is_interrupted_at_once(world: PretendedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """While only the head's answer is waited for, which would take longer than any test."""
    monkeypatch.setattr("odmoe.machines.status.HEAD_S", 900.0)
    world.head(start=[(0, world.ready())], status=[(900.0, world.ready())])
    up(world.file, world.settings, world.terminal)
    asked = len(world.requests())

    def interrupt() -> None:
        wait_until(lambda: len(world.requests()) > asked, "the head is asked")
        time.sleep(2.0)  # the hosts have answered by now, on most machines
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell has put us behind
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            status(world.file)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


def test_down_ends_everything_and_says_what_it_could_not_reach(world: PretendedCluster) -> None:
    ready = world.ready()
    world.head(start=[(0, ready)])
    up(world.file, world.settings, world.terminal)
    down(world.file, world.terminal)
    assert [request["do"] for request, *_ in world.requests()] == ["start", "stop"]
    stderr = world.stderr()
    for host in world.cluster.hosts:  # the double of `ray down` ends nothing
        assert f"{host.name} ({host.address}): ended what was left: sleep" in stderr
    assert stderr.strip().splitlines()[-1] == "nothing runs any more on 4 hosts"
    down(world.file, world.terminal)
    assert world.stderr().count("ended what was left") == 4
    world.file.write_text(world.file.read_text().replace("127.0.99.4", "127.0.98.4"))
    with pytest.raises(LaunchError, match="1 of 4 hosts may still run something: worker-1"):
        down(world.file, world.terminal)
    assert "worker-1 (127.0.98.4): not stopped: ssh is refused" in world.stderr()


def test_down_where_the_head_cannot_be_asked(world: PretendedCluster) -> None:
    ready = world.ready()
    world.head(start=[(0, ready)])
    up(world.file, world.settings, world.terminal)
    shutil.rmtree(world.home(0) / "odmoe" / "code")
    (world.base / "ray-fails").touch()
    down(world.file, world.terminal)
    stderr = world.stderr()
    assert "the nodes could not be asked to stop, and are killed" in stderr
    assert "ray down ended with exit code 1" in stderr
    assert "nothing runs any more on 4 hosts" in stderr


def test_ray_s_own_logs_are_read_on_the_host_and_the_launcher_s_on_the_head(
    world: PretendedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = world.base / "logs"
    logs.mkdir()
    monkeypatch.setattr(ray_cli, "LOGS", str(logs))
    hosts = list(world.cluster.hosts)
    with Ssh.for_cluster(world.cluster, cluster_dir("odmoe-test")) as ssh:
        assert ray_cli.ray_says(ssh, hosts[0], hosts[1:]) == {}
        (logs / "monitor.out").write_text(
            "NodeUpdater: 127.0.99.22: Ray start commands failed [LogTimer=9ms]\n"
            "NodeUpdater: 127.0.99.2: \x1b[31mRay start commands failed\x1b[0m [LogTimer=7ms]\nsomething failed\n"
        )
        assert ray_cli.ray_says(ssh, hosts[0], hosts[1:]) == {
            "127.0.99.2": "NodeUpdater: 127.0.99.2: Ray start commands failed [LogTimer=7ms]"
        }
        (logs / "raylet.out").write_text("[2026-11-21 16:32:00,357 E 8 8] (raylet) x.cc:1: no port for it\n")
        found = ray_cli.ray_says(ssh, hosts[0], hosts[1:])  # these hosts have their logs in common
        assert found == {host.address: "no port for it" for host in hosts[1:]}
        os.utime(logs / "raylet.out", (1, 1))
        assert list(ray_cli.ray_says(ssh, hosts[0], hosts[1:])) == ["127.0.99.2"]

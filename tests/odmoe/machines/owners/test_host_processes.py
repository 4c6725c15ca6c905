"""Which processes of a host are the cluster's, and that no others end. The hosts' script runs here."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from odmoe.machines.cluster_file import ClusterFile
from odmoe.machines.preflight import probe, stop_processes
from support.machines.local_hosts import LocalSsh
from support.machines.processes import wait_until
from support.paths import ROOT

SESSION = "session_2026-11-27_03-20-14_903247_9310"


@pytest.fixture
def session(tmp_path: Path) -> Path:
    folder = tmp_path / "ray" / SESSION / "logs"
    folder.mkdir(parents=True)
    return folder


def test_a_process_whose_environment_is_overwritten_is_found(
    ssh: LocalSsh, lab: ClusterFile, start: Any, session: Path
) -> None:
    """Titles overwrite it. One writes to Ray's logs, the other has a parent that is known."""
    with (session / "agent.out").open("w") as log:
        raylet = start("127.0.9.1", "raylet", f"--raylet_socket_name={session.parent}/sockets/raylet")
        agent = start("127.0.9.1", "ray-agent", marked=False, stdout=log)
    stranger = start("127.0.9.1", "ray-other", marked=False)
    code = "import subprocess, time; subprocess.Popen(['sleep', '600'], env={}); time.sleep(600)"
    mark = {"RAY_AUTH_TOKEN_PATH": f"{ssh.home('127.0.9.1')}/odmoe/keys/ray_token"}
    parent = subprocess.Popen([sys.executable, "-S", "-c", code], env=mark)
    wanted = ["python -c", "ray-agent", "raylet", "sleep"]
    wait_until(lambda: probe(ssh, lab.hosts[0])["processes"] == wanted, "all have started")
    done = stop_processes(ssh, lab.hosts[0], None, release=True)
    assert done["left"] == []
    assert done["stopped"] == wanted
    for process in (raylet, agent, parent):
        process.wait(30)
    assert stranger.poll() is None


def test_a_title_that_ray_sets_does_not_hide_a_process(ssh: LocalSsh, lab: ClusterFile, tmp_path: Path) -> None:
    """Ray's own function, with the environment of deploy/env.sh; the process has no parent of ours and no log."""
    code = (
        "import ray._raylet, time; ray._raylet.setproctitle('ray::DashboardAgent'); print(flush=True); time.sleep(600)"
    )
    (ssh.home("127.0.9.1") / "odmoe").mkdir()
    python = ROOT / ".venv" / "bin" / "python"
    script = f'. {ROOT}/deploy/env.sh; PYTHONPATH= exec {python} -c "{code}"'
    env = {"HOME": str(ssh.home("127.0.9.1")), "PATH": os.environ["PATH"]}
    with subprocess.Popen(["sh", "-c", script], env=env, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            assert probe(ssh, lab.hosts[0])["processes"] == ["ray::DashboardAgent"]
            assert stop_processes(ssh, lab.hosts[0], None, release=True)["stopped"] == ["ray::DashboardAgent"]
            process.wait(30)
        finally:
            process.kill()


def test_another_ray_is_told_and_stays(ssh: LocalSsh, lab: ClusterFile, start: Any) -> None:
    ours = start("127.0.9.1", "raylet", "--node_manager_port=6380")
    other = start("127.0.9.1", "gcs_server", "--gcs_server_port=7777", marked=False)
    elsewhere = start("127.0.9.2", "raylet")  # of this user's other home: another cluster of ours
    rays = {ray["pid"]: ray for ray in probe(ssh, lab.hosts[0])["other_rays"]}
    assert ours.pid not in rays
    found = rays[other.pid]
    assert (found["name"], found["user"], found["port"]) == ("gcs_server", getpass.getuser(), 7777)
    assert abs(found["since"] - time.time()) < 30
    assert elsewhere.pid in rays
    stop_processes(ssh, lab.hosts[0], None, release=True)
    ours.wait(30)
    assert (other.poll(), elsewhere.poll()) == (None, None)


def test_ray_stop_on_a_host_ends_only_the_cluster_s(ssh: LocalSsh, lab: ClusterFile, start: Any) -> None:
    """Also in a cluster file from before, which says `ray stop`."""
    home = ssh.home("127.0.9.1")
    (home / "odmoe").mkdir()
    (home / "odmoe" / "code").symlink_to(ROOT)
    other = start("127.0.9.1", "raylet", marked=False)
    for command in ("! pgrep -x 'raylet|gcs_server' > /dev/null || ray stop --grace-period 5", "stop_cluster"):
        ours = start("127.0.9.1", "raylet")
        wait_until(lambda: probe(ssh, lab.hosts[0])["processes"], "it has started")
        ssh.run(lab.hosts[0], f". {ROOT}/deploy/env.sh; {command}", 60)
        ours.wait(30)
        assert other.poll() is None


def test_what_cannot_be_ended_is_named(ssh: LocalSsh, lab: ClusterFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of another user: signals do not reach it."""
    home = ssh.home("127.0.9.1")
    source = (ROOT / "odmoe" / "machines" / "probe.py").read_text().partition('if __name__ == "__main__"')[0]
    script = source + "\nASK_S = KILL_S = 0.2\nos.kill = lambda *_: None\nprint(json.dumps(stop()))\n"
    mark = {"RAY_AUTH_TOKEN_PATH": f"{home}/odmoe/keys/ray_token"}
    with subprocess.Popen(["sleep", "600"], env=os.environ | mark) as process:
        try:
            answer = ssh.run(lab.hosts[0], "python3 -", 60, script.encode())
            assert f"sleep (process {process.pid})" in answer.partition('"left"')[2]
        finally:
            process.kill()

"""Ray's start without its agents, tried again where it was too slow."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ray._private import services

from odmoe.on_ray import ray_start
from odmoe.on_ray.ray_start import start_patiently, without_agents

SLOW = "The current node timed out during startup. This could happen because some of the raylet failed."
"""The words of Ray 2.60's `Node.__init__`."""


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_start, "PAUSE_S", 0.0)


@pytest.fixture
def raylets(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines with which Ray was asked to start a process."""
    asked: list[list[str]] = []
    monkeypatch.setattr(services, "start_ray_process", lambda command, kind, *_, **__: asked.append(command))
    return asked


def test_a_raylet_starts_no_agent_and_waits_for_none() -> None:
    plain = ["raylet", "--node_id=1", "--metrics-agent-port=0", "--runtime_env_agent_port=6382"]
    found = without_agents([*plain, "--dashboard_agent_command=python agent.py", "--runtime_env_agent_command=x y"])
    assert found[:2] == plain[:2]
    options = dict(word.split("=", 1) for word in found[1:])
    assert len(options) == len(found) - 1, "none is given twice"
    for name in ("metrics-agent-port", "metrics_export_port", "runtime_env_agent_port", "dashboard_agent_listen_port"):
        assert options[f"--{name}"] == "-1"
    assert not any("agent.py" in word for word in found)


@pytest.mark.slow
def test_what_stands_for_an_agent_ends_with_its_raylet() -> None:
    program = (
        "import shlex, subprocess, sys; print(subprocess.Popen(shlex.split(sys.argv[1])).pid, flush=True); input()"
    )
    command = [sys.executable, "-c", program, ray_start.AGENT]
    raylet = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert raylet.stdin is not None
    assert raylet.stdout is not None
    with raylet.stdin, raylet.stdout:
        agent = int(raylet.stdout.readline())
        time.sleep(1.5)
        assert Path(f"/proc/{agent}").exists()
        raylet.kill()
        raylet.wait()
    end = subprocess.run(["timeout", "20", "tail", f"--pid={agent}", "-f", "/dev/null"], check=False)
    assert end.returncode == 0


def test_other_processes_of_ray_start_as_they_are(raylets: list[list[str]]) -> None:
    def start() -> None:
        services.start_ray_process(["gcs_server"], "gcs_server", fate_share=False)
        services.start_ray_process(["raylet"], "raylet", fate_share=False)

    plain = services.start_ray_process
    start_patiently(start, print)
    assert raylets == [["gcs_server"], without_agents(["raylet"])]
    assert services.start_ray_process is plain


def test_too_slow_is_tried_again_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(ray_start, "kill_half_started", lambda home: events.append("killed"))

    def start() -> str:
        events.append("start")
        if events.count("start") < 3:
            raise Exception(SLOW)
        return "runs"

    said: list[str] = []
    assert start_patiently(start, said.append) == "runs"
    assert events == ["start", "killed", "start", "killed", "start"]
    assert [line.rpartition("trying again, ")[2] for line in said] == ["2 left", "1 left"]


@pytest.mark.parametrize(("message", "starts"), [(SLOW, 3), ("port 6379 is in use", 1)])
def test_tries_are_bounded_and_other_errors_are_told_at_once(
    message: str, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(ray_start, "kill_half_started", lambda home: events.append("killed"))

    def start() -> Any:
        events.append("start")
        raise RuntimeError(message)

    with pytest.raises(RuntimeError, match=message.split(".")[0]):
        start_patiently(start, lambda text: None)
    assert events == ["start", "killed"] * starts

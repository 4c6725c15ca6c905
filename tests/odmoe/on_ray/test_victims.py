"""Faults of the processes of a cluster's nodes, without Ray, and what is told while the main node is away."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from odmoe.chaos.spoil import FROZEN, LINK, STORE
from odmoe.on_ray import victims
from odmoe.on_ray.victims import NodeProcesses
from scheduler.errors import LinkError

WORKER = {"kind": "worker", "number": 0, "address": "10.0.0.7", "state": "ready"}
OTHER = WORKER | {"number": 1, "address": "10.0.0.8"}
SHADOW = {"kind": "shadow", "number": 0, "address": "10.0.0.7", "state": "ready"}


class Cluster:
    """`rows` None: the main node is away."""

    def __init__(self, rows: list[dict[str, Any]] | None, *pids: int) -> None:
        self.rows, self._pids = rows, pids

    def nodes(self) -> list[dict[str, Any]]:
        if self.rows is None:
            raise LinkError("the main node died")
        return self.rows

    def pid(self, name: str) -> int:
        return self._pids[int(name.split()[-1]) if len(self._pids) > 1 else 0]

    def store(self) -> str:
        return "store"


def processes(cluster: Cluster, here: bool = False) -> NodeProcesses:
    return NodeProcesses(cluster, here)  # type: ignore[arg-type]


def test_kill_and_usage_on_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself must take what is sent; here it runs at once, in one process for each host."""
    asked: list[dict[str, float]] = []

    def remote(hand: Any) -> Any:
        ray.remote(hand)

        def options(resources: dict[str, float], **given: Any) -> Any:
            asked.append(resources)
            return SimpleNamespace(remote=lambda: SimpleNamespace(do=SimpleNamespace(remote=hand().do)))

        return SimpleNamespace(options=options)

    monkeypatch.setattr(victims, "ray", SimpleNamespace(remote=remote))
    monkeypatch.setattr(victims, "get", lambda done, *rest: done)
    process = subprocess.Popen(["sleep", "60"])
    try:
        found = processes(Cluster([WORKER, OTHER], process.pid))
        assert set(found.usage()) == {"main node", "worker 0", "worker 1"}
        assert found.kill(["worker 0", "worker 7"]) == ["worker 0"]
        assert process.wait(10) == -signal.SIGKILL
        assert found.kill(["worker 1"]) == []
    finally:
        process.kill()
        process.wait(10)
    assert asked == [{f"node:{one['address']}": victims.TOUCH} for one in (WORKER, OTHER)]


def test_what_is_spoilt_at_which_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main node's address is cut off, the cluster's store damaged, a node's own process frozen."""
    asked: list[tuple[str, Any]] = []

    def begin(own: Any, host: str, call: Any, targets: list[str]) -> Any:
        asked.append((host, (*call.args, *targets)))
        return lambda: targets

    monkeypatch.setattr(victims.ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.setattr(NodeProcesses, "_begin", begin)
    found = processes(Cluster([WORKER, OTHER], 77))
    assert found.spoil(["worker 0", "worker 1"], LINK, 2.0) == ["worker 0", "worker 1"]
    assert found.spoil(["worker 1"], STORE, 2.0) == ["worker 1"]
    assert found.spoil(["main node", "worker 2"], FROZEN, 2.0) == ["main node"]
    assert asked == [
        ("10.0.0.7", (LINK, 2.0, "10.0.0.1")),
        ("10.0.0.8", (LINK, 2.0, "10.0.0.1")),
        ("10.0.0.8", (STORE, 2.0, "store")),
        ("", (FROZEN, 2.0, "77")),
    ]


@pytest.mark.slow
def test_all_nodes_of_a_host_are_frozen_at_once() -> None:
    """Each would thaw before the next one's process had begun, a second later on a busy machine."""
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(16)]
    try:
        rows = [WORKER | {"number": number} for number in range(16)]
        found = processes(Cluster(rows, *(one.pid for one in sleepers)), here=True)
        names = [f"worker {number}" for number in range(16)]
        assert found.spoil(names, FROZEN, 0.5) == names
        end, most = time.monotonic() + 5.0, 0
        while most < 16 and time.monotonic() < end:
            states = [Path(f"/proc/{one.pid}/stat").read_text().split()[2] for one in sleepers]
            most = max(most, states.count("T"))
        assert most == 16
    finally:
        for one in sleepers:
            one.kill()
            one.wait(10)


@pytest.mark.parametrize("rows", [None, []])
def test_a_main_node_that_is_away(rows: list[dict[str, Any]] | None) -> None:
    """One that starts again has no rows at first."""
    found = processes(Cluster(rows, os.getpid()), here=True)
    assert found.missing() == ["main node"]
    assert found.workers() == []
    assert set(found.usage()) == (set() if rows is None else {"main node"})


def test_who_is_missing() -> None:
    shadow = {"kind": "shadow", "number": 0, "address": "", "state": "starting"}
    cluster = Cluster([WORKER, shadow])
    assert processes(cluster).missing() == ["shadow"]
    shadow["state"] = "ready"
    assert processes(cluster).missing() == []


@pytest.mark.parametrize(
    ("rows", "able"),
    [
        ([WORKER, OTHER, SHADOW], True),
        ([], False),
        ([SHADOW], False),
        ([WORKER, OTHER | {"address": "10.0.0.7"}], False),
        ([WORKER, OTHER | {"address": "10.0.0.1"}], False),
        ([WORKER, SHADOW | {"address": ""}], False),
        ([WORKER, OTHER | {"address": "10.0.0.9"}], False),
        (None, False),
    ],
)
def test_links_are_cut_if_each_worker_has_a_host_of_its_own(
    monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]] | None, able: bool
) -> None:
    """The main node's is 10.0.0.1; 10.0.0.9 does not let its links be changed."""
    monkeypatch.setattr(victims.ray.util, "get_node_ip_address", lambda: "10.0.0.1")

    def begin(own: Any, host: str, call: Any, **given: Any) -> Any:
        return lambda: call is victims.may_cut and host != "10.0.0.9"

    monkeypatch.setattr(NodeProcesses, "_begin", begin)
    assert processes(Cluster(rows)).can_spoil() is able
    assert not processes(Cluster(rows), here=True).can_spoil()

"""Faults of the processes of a cluster's nodes, without Ray, and what is told while the main node is away."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from odmoe.chaos.spoil import FROZEN, LINK, STORE
from odmoe.on_ray import victims
from odmoe.on_ray.calls import CONTROL_S
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


class Hosts:
    """Ray itself must take what is sent; here it runs in this process once it is waited for, `late_s` later. `asked`:
    the resources of each process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[dict[str, float]] = []
        self.late_s = self.ahead_s = 0.0
        own = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
        monkeypatch.setattr(victims, "ray", SimpleNamespace(remote=self._remote, util=own))
        monkeypatch.setattr(victims, "get", lambda pending, *rest: pending())

    def _remote(self, hand: Any) -> Any:
        ray.remote(hand)

        def options(resources: dict[str, float], **given: Any) -> Any:
            self.asked.append(resources)
            made = hand()
            methods = {
                name: SimpleNamespace(remote=partial(partial, self._run, getattr(made, name)))
                for name in ("clock", "do")
            }
            return SimpleNamespace(remote=lambda: SimpleNamespace(**methods))

        return SimpleNamespace(options=options)

    def _run(self, method: Any, *args: Any) -> Any:
        """By the host's own clock."""
        own = SimpleNamespace(monotonic=lambda: time.monotonic() + self.ahead_s + self.late_s)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(victims, "time", own)
            return method(*args)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(monkeypatch)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as made:
        yield made
        made.kill()


def test_kill_and_usage_on_another_host(hosts: Hosts, process: subprocess.Popen[bytes]) -> None:
    found = processes(Cluster([WORKER, OTHER], process.pid))
    assert set(found.usage()) == {"main node", "worker 0", "worker 1"}
    assert found.kill(["worker 0", "worker 7"]) == ["worker 0"]
    assert process.wait(10) == -signal.SIGKILL
    assert found.kill(["worker 1"]) == []
    assert hosts.asked == [{f"node:{one['address']}": victims.TOUCH} for one in (WORKER, OTHER)]


@pytest.mark.parametrize("ahead_s", [0.0, -3600.0, 3600.0])
def test_a_kill_that_comes_late_is_not_carried_out(
    ahead_s: float, hosts: Hosts, process: subprocess.Popen[bytes]
) -> None:
    """Nobody counts it, whatever that host's clock shows."""
    hosts.ahead_s = ahead_s
    found = processes(Cluster([WORKER], process.pid))
    assert found.workers() == ["worker 0"]
    assert set(found.usage()) == {"main node", "worker 0"}
    hosts.late_s = CONTROL_S
    assert found.kill(["worker 0"]) == []
    assert process.poll() is None
    hosts.late_s = 0.0
    assert found.kill(["worker 0"]) == ["worker 0"]


def test_every_host_has_its_process_before_any_fault(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its links cannot be cut, as with two workers on one host."""
    monkeypatch.setattr(victims, "may_cut", lambda: True)
    rows = [WORKER, OTHER, OTHER | {"number": 2}, SHADOW | {"address": "10.0.0.9"}]
    assert not processes(Cluster(rows)).can_spoil()
    assert sorted(map(str, hosts.asked)) == [f"{{'node:10.0.0.{n}': {victims.TOUCH}}}" for n in (7, 8, 9)]


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
        assert found.spoil(names, FROZEN, 2.0) == names
        end, most = time.monotonic() + 10.0, 0
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

    monkeypatch.setattr(NodeProcesses, "_start_hands", lambda own, hosts, within_s: None)
    monkeypatch.setattr(NodeProcesses, "_begin", begin)
    assert processes(Cluster(rows)).can_spoil() is able
    assert not processes(Cluster(rows), here=True).can_spoil()

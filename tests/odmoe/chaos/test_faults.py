"""Each fault of the table on processes of this machine: who is hit, and that nobody stays frozen."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from odmoe.chaos import faults
from odmoe.chaos.faults import FAULTS, MAIN, SHADOW, chosen_faults
from scheduler.errors import ConfigError


class Sleepers:
    """A process for each node, as `NodeProcesses` reaches them; killed ones come back at once."""

    def __init__(self) -> None:
        self.left, self.away = 0, 0
        """`away`: so many signals find nobody after a kill."""
        self.nodes = {name: self._start() for name in ("worker 0", "worker 1", "worker 2", SHADOW, MAIN)}
        self.first = dict(self.nodes)
        self.sent: list[tuple[str, signal.Signals]] = []
        self.spoilt: list[tuple[str, str]] = []
        self._absent = 0

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "60"])

    def workers(self) -> list[str]:
        return ["worker 0", "worker 1", "worker 2"]

    def send(self, name: str, number: signal.Signals, again: bool = False) -> bool:
        if self._absent:
            self._absent -= 1
            return False
        self.sent.append((name, number))
        process = self.nodes[name]
        os.kill(process.pid, number)
        if number == signal.SIGKILL:
            process.wait(10)
            self.nodes[name] = self._start()
            self._absent = self.away
        return True

    def spoil(self, name: str, what: str, seconds: float) -> bool:
        self.spoilt.append((name, what))
        return True

    def leave(self) -> int:
        self.left += 1
        return 2

    def killed(self) -> list[str]:
        return [name for name, process in self.nodes.items() if process is not self.first[name]]

    def check_stopped(self, names: list[str]) -> None:
        """A signal takes a moment."""
        end = time.monotonic() + 5
        while self._stopped() != names:
            assert time.monotonic() < end, self._stopped()

    def _stopped(self) -> list[str]:
        states = {name: Path(f"/proc/{one.pid}/stat").read_text().split()[2] for name, one in self.nodes.items()}
        return [name for name, state in states.items() if state == "T"]

    def close(self) -> None:
        for process in {*self.nodes.values(), *self.first.values()}:
            process.kill()
            process.wait(10)


@pytest.fixture
def sleepers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sleepers]:
    monkeypatch.setattr(faults, "FROZEN_S", (0.05, 0.06))
    monkeypatch.setattr(faults, "SLOW_S", 0.3)
    monkeypatch.setattr(faults, "SOON_S", 0.0)
    monkeypatch.setattr(faults, "AGAIN_S", 0.01)
    made = Sleepers()
    yield made
    made.close()


KILLED = {"worker-killed": 1, "two-killed": 2, "all-killed": 3, "worker-flaps": 1, "shadow-killed": 1, "main-killed": 1}
SPOILT = {"link-cut": (1, "link"), "all-cut": (3, "link"), "store-damaged": (1, "store")}
FROZEN = {"worker-frozen": 1, "all-frozen": 3, "worker-slow": 1, "shadow-frozen": 1, "main-frozen": 1}


@pytest.mark.parametrize("name", FAULTS)
def test_who_is_hit(name: str, sleepers: Sleepers) -> None:
    said = FAULTS[name].strike(sleepers, random.Random(3))
    assert len(sleepers.killed()) == KILLED.get(name, 0)
    hit = {victim for victim, number in sleepers.sent if number == signal.SIGSTOP}
    assert len(hit) == FROZEN.get(name, 0)
    sleepers.check_stopped([])
    count, what = SPOILT.get(name, (0, ""))
    assert [spoilt for _, spoilt in sleepers.spoilt] == [what] * count
    assert all(victim in said for victim in [*sleepers.killed(), *hit, *dict(sleepers.spoilt)])
    assert sleepers.left == (name == "clients-leave")


def test_a_worker_that_flaps_is_killed_as_often_as_it_comes_back(
    sleepers: Sleepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleepers.away = 4
    assert FAULTS["worker-flaps"].strike(sleepers, random.Random(3)) in sleepers.workers()
    assert [number for _, number in sleepers.sent] == [signal.SIGKILL] * 3
    sleepers.away = 10**9
    monkeypatch.setattr(faults, "RETURN_S", 0.1)
    sleepers.sent.clear()
    FAULTS["worker-flaps"].strike(sleepers, random.Random(3))
    assert len(sleepers.sent) == 1


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_without_a_victim_is_none(name: str, sleepers: Sleepers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleepers, "workers", list)
    monkeypatch.setattr(sleepers, "send", lambda *given, **how: False)
    monkeypatch.setattr(sleepers, "spoil", lambda *given: False)
    monkeypatch.setattr(sleepers, "leave", lambda: 0)
    monkeypatch.setattr(faults, "RETURN_S", 0.05)
    assert FAULTS[name].strike(sleepers, random.Random(3)) == ""


def test_every_fault_is_tried() -> None:
    assert {*KILLED, *FROZEN, *SPOILT, "clients-leave"} == set(FAULTS)


def test_an_interrupt_leaves_nobody_frozen(sleepers: Sleepers, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        sleepers.check_stopped(sleepers.workers())
        raise KeyboardInterrupt

    monkeypatch.setattr(faults, "time", SimpleNamespace(sleep=interrupted))
    with pytest.raises(KeyboardInterrupt):
        FAULTS["all-frozen"].strike(sleepers, random.Random(0))
    sleepers.check_stopped([])


def test_which_faults_a_cluster_can_have() -> None:
    names = {fault.name for fault in chosen_faults(None, ["main"])}
    assert names == set(FAULTS) - {"shadow-killed", "shadow-frozen", "main-killed", *SPOILT}
    assert [fault.name for fault in chosen_faults("main-killed,worker-slow", ["restarts"])] == [
        "main-killed",
        "worker-slow",
    ]
    assert chosen_faults("none", []) == []
    with pytest.raises(ConfigError, match="--faults has 'main-killed'; allowed for this cluster: worker-killed"):
        chosen_faults("main-killed", ["shadow"])

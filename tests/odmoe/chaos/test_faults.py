"""Each fault of the table on processes of this machine: who is hit."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator, Sequence

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
        self.kills = 0
        self.spoilt: list[tuple[str, str]] = []
        self._absent = 0

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "60"])

    def workers(self) -> list[str]:
        return ["worker 0", "worker 1", "worker 2"]

    def kill(self, names: Sequence[str]) -> list[str]:
        if self._absent:
            self._absent -= 1
            return []
        for name in names:
            process = self.nodes[name]
            process.kill()
            process.wait(10)
            self.nodes[name] = self._start()
            self.kills += 1
            self._absent = self.away
        return list(names)

    def spoil(self, names: Sequence[str], what: str, seconds: float) -> list[str]:
        self.spoilt += [(name, what) for name in names]
        return list(names)

    def leave(self) -> int:
        self.left += 1
        return 2

    def killed(self) -> list[str]:
        return [name for name, process in self.nodes.items() if process is not self.first[name]]

    def close(self) -> None:
        for process in {*self.nodes.values(), *self.first.values()}:
            process.kill()
            process.wait(10)


@pytest.fixture
def sleepers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sleepers]:
    monkeypatch.setattr(faults, "SPOILT_S", (0.05, 0.06))
    monkeypatch.setattr(faults, "SOON_S", 0.0)
    monkeypatch.setattr(faults, "AGAIN_S", 0.01)
    made = Sleepers()
    yield made
    made.close()


KILLED = {"worker-killed": 1, "two-killed": 2, "all-killed": 3, "worker-flaps": 1, "shadow-killed": 1, "main-killed": 1}
SPOILT = {
    "link-cut": (1, "link"),
    "all-cut": (3, "link"),
    "store-damaged": (1, "store"),
    "worker-frozen": (1, "frozen"),
    "all-frozen": (3, "frozen"),
    "worker-slow": (1, "slow"),
    "shadow-frozen": (1, "frozen"),
    "main-frozen": (1, "frozen"),
}


HOSTS = ("link-cut", "all-cut", "store-damaged")


@pytest.mark.parametrize("name", FAULTS)
def test_who_is_hit(name: str, sleepers: Sleepers) -> None:
    said = FAULTS[name].strike(sleepers, random.Random(3))
    assert len(sleepers.killed()) == KILLED.get(name, 0)
    count, what = SPOILT.get(name, (0, ""))
    assert [spoilt for _, spoilt in sleepers.spoilt] == [what] * count
    assert all(victim in said for victim in [*sleepers.killed(), *dict(sleepers.spoilt)])
    assert sleepers.left == (name == "clients-leave")


def test_a_worker_that_flaps_is_killed_as_often_as_it_comes_back(
    sleepers: Sleepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleepers.away = 4
    assert FAULTS["worker-flaps"].strike(sleepers, random.Random(3)) in sleepers.workers()
    assert sleepers.kills == 3
    sleepers.away = 10**9
    monkeypatch.setattr(faults, "RETURN_S", 0.1)
    FAULTS["worker-flaps"].strike(sleepers, random.Random(3))
    assert sleepers.kills == 4


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_without_a_victim_is_none(name: str, sleepers: Sleepers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleepers, "workers", list)
    monkeypatch.setattr(sleepers, "kill", lambda names: [])
    monkeypatch.setattr(sleepers, "spoil", lambda *given: [])
    monkeypatch.setattr(sleepers, "leave", lambda: 0)
    monkeypatch.setattr(faults, "RETURN_S", 0.05)
    assert FAULTS[name].strike(sleepers, random.Random(3)) == ""


def test_every_fault_is_tried() -> None:
    assert {*KILLED, *SPOILT, "clients-leave"} == set(FAULTS)


def test_which_faults_a_cluster_can_have() -> None:
    names = {fault.name for fault in chosen_faults(None, ["main"])}
    assert names == set(FAULTS) - {"shadow-killed", "shadow-frozen", "main-killed", *HOSTS}
    assert [fault.name for fault in chosen_faults("main-killed,worker-slow", ["restarts"])] == [
        "main-killed",
        "worker-slow",
    ]
    assert chosen_faults("none", []) == []
    with pytest.raises(ConfigError, match="--faults has 'main-killed'; allowed for this cluster: worker-killed"):
        chosen_faults("main-killed", ["shadow"])

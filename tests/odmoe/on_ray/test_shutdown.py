"""The end of nodes that Ray names for longer, or only later, than they are there."""

from __future__ import annotations

from typing import Any

import pytest

from odmoe.on_ray import shutdown
from odmoe.on_ray.seats import MAIN, NAMESPACE


class SlowRay:
    """Names an actor at `looks` from `appears` on, and once more after it was killed. Nothing else is needed of Ray."""

    def __init__(self, appears: dict[str, int]) -> None:
        self.appears = dict(appears)
        self.looks = 0
        self.killed: list[str] = []
        self.forgotten: set[str] = set()
        self.util = self

    def list_named_actors(self, all_namespaces: bool) -> list[dict[str, str]]:
        self.looks += 1
        there = [name for name, look in self.appears.items() if look <= self.looks and name not in self.forgotten]
        self.forgotten |= set(self.killed)
        return [{"name": name, "namespace": NAMESPACE} for name in there] + [{"name": "x", "namespace": "another's"}]

    def get_actor(self, name: str, namespace: str) -> Any:
        if name in self.killed:
            raise ValueError(f"{name} is not there")
        return name

    def kill(self, actor: str, no_restart: bool) -> None:
        self.killed.append(actor)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Any:
    def ended(appears: dict[str, int], call: Any) -> SlowRay:
        ray = SlowRay(appears)
        monkeypatch.setattr(shutdown, "ray", ray)
        monkeypatch.setattr(shutdown, "LOOK_S", 0.0)
        monkeypatch.setattr(shutdown, "end", lambda actors: [ray.kill(actor, True) for actor in actors])
        call()
        return ray

    return ended


def test_nodes_are_looked_for_until_none_is_named(ended: Any) -> None:
    """Worker 1 appears while worker 0 is still named."""
    ray = ended({"worker 0": 1, "worker 1": 3}, shutdown.end_orphans)
    assert sorted(ray.killed) == ["worker 0", "worker 1"]
    assert ray.list_named_actors(True) == [{"name": "x", "namespace": "another's"}]


def test_nodes_of_a_main_node_that_runs_stay(ended: Any) -> None:
    ray = ended({MAIN: 1, "worker 0": 1}, shutdown.end_orphans)
    assert ray.killed == []


def test_a_node_that_stays_named_is_waited_for_only_so_long(ended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(shutdown.time, "monotonic", lambda: float(next(clock)))
    ray = ended({MAIN: 2, "worker 0": 1}, shutdown.end_orphans)
    assert ray.killed == ["worker 0"]
    assert ray.looks <= 8

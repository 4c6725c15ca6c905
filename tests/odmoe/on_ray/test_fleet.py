"""A main node's fleet, without Ray: which processes it makes, which it makes anew, what is left when it is closed."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from odmoe.machines.cluster_file import Host
from odmoe.on_ray import fleet as module
from odmoe.on_ray.fleet import Fleet
from odmoe.settings.settings import Settings
from scheduler.errors import LinkError

SETTINGS = Settings(model="m", cluster="local", shadow="none", threads=1, secret="s")


class PretendedRay:
    """`ray`, as far as a fleet asks for processes: those that it made and ended. `making`: set when one is being made,
    which takes until `go` is set."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.killed: list[Any] = []
        self.making, self.go = threading.Event(), threading.Event()
        self.go.set()

    def nodes(self) -> list[dict[str, Any]]:
        address, resources = "127.0.0.1", {"worker_node": 2.0}
        return [{"NodeManagerAddress": address, "Alive": True, "Resources": resources}]

    def remote(self, kind: type) -> PretendedRay:
        return self

    def options(self, name: str, **options: Any) -> SimpleNamespace:
        def make(*given: Any) -> SimpleNamespace:
            self.making.set()
            assert self.go.wait(60)
            self.made.append(name)
            return SimpleNamespace(name=name)

        return SimpleNamespace(remote=make)

    def wait(self, pending: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return pending, []


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> PretendedRay:
    made = PretendedRay()
    monkeypatch.setattr(module, "ray", made)
    monkeypatch.setattr(module, "end", made.killed.extend)
    return made


@pytest.fixture
def fleet(ray: PretendedRay) -> Fleet:
    """Of two workers that are known."""
    engine: Any = SimpleNamespace(
        peers=SimpleNamespace(nodes=list, wasted_s=lambda role, number: 0.0), waiting=lambda: False
    )
    made = Fleet(engine, SETTINGS, "store", None)
    assert made.find_seats() == [("worker", 0), ("worker", 1)]
    return made


def test_a_divided_shadow_comes_with_its_last_host(ray: PretendedRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one node of the engine's, whose parts are on the hosts of the cluster file in their order."""
    hosts = {f"10.0.0.{n}": Host("shadow_node", n, f"10.0.0.{n}") for n in range(3)}
    monkeypatch.setattr(module, "hosts_of_launcher", lambda: hosts)
    there: list[str] = []
    monkeypatch.setattr(
        ray, "nodes", lambda: [{"NodeManagerAddress": a, "Alive": True, "Resources": {"shadow_node": 1}} for a in there]
    )
    engine: Any = SimpleNamespace(
        peers=SimpleNamespace(nodes=list, wasted_s=lambda role, number: 0.0), waiting=lambda: False
    )
    made = Fleet(engine, SETTINGS.replace(cluster="auto", shadow="nf4", shadow_hosts=2), "store", None)
    found = []
    for address in ("10.0.0.2", "10.0.0.1", "10.0.0.0"):
        there.append(address)
        found.append(made.find_seats())
    assert found == [[], [], [("shadow", 0)]]
    assert made.find_seats() == []
    assert [(row["number"], row["address"]) for row in made.facts()] == [(0, "10.0.0.0"), (1, "10.0.0.1")]


def test_a_fleet_that_is_closed_makes_no_process(ray: PretendedRay, fleet: Fleet) -> None:
    fleet.actor("worker", 0)
    fleet.close()
    with pytest.raises(LinkError, match=r"closed before worker_node at 127\.0\.0\.1, place 1"):
        fleet.actor("worker", 1)
    assert [actor.name for actor in ray.killed] == ray.made == ["worker_node at 127.0.0.1"]


def test_what_is_being_made_while_it_closes_is_ended_too(ray: PretendedRay, fleet: Fleet) -> None:
    ray.go.clear()
    making = threading.Thread(target=fleet.actor, args=("worker", 0))
    making.start()
    assert ray.making.wait(60)
    closing = threading.Thread(target=fleet.close)
    closing.start()
    assert fleet.reconnector.closing.wait(60)
    ray.go.set()
    making.join(60)
    closing.join(60)
    assert [actor.name for actor in ray.killed] == ray.made == ["worker_node at 127.0.0.1"]


def test_a_process_that_is_gone_for_good_is_made_anew(
    ray: PretendedRay, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def died(*asked: Any) -> None:
        raise LinkError("worker 0 died") from ActorDiedError()

    fleet.actor("worker", 0)
    monkeypatch.setattr(module, "get", died)
    with pytest.raises(LinkError, match="worker 0 died"):
        fleet.join("worker", 0, begun=object())
    fleet.actor("worker", 0)
    assert ray.made == ["worker_node at 127.0.0.1"] * 2


def test_the_last_address_is_tried_until_ray_answers(
    ray: PretendedRay, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host whose link was cut is reached again long before Ray notices it."""
    tried: list[str] = []

    def add(kind: str, number: int, address: str, reach_s: float = 10.0) -> None:
        tried.append(address)
        if len(tried) < 4:
            raise LinkError("no route")

    monkeypatch.setattr(fleet, "_add", add)
    monkeypatch.setattr(fleet, "begin", lambda kind, number: object())
    monkeypatch.setattr(ray, "wait", lambda pending, timeout: ([], pending))
    fleet._addresses[fleet._seats["worker"][0]] = "10.0.0.1:7"
    fleet.join("worker", 0)
    assert tried == ["10.0.0.1:7"] * 4

"""Where nodes can stand, from what Ray says of its hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from odmoe.machines.cluster_file import read_hosts
from odmoe.on_ray.seats import Seat, group_size, hosts_of_launcher, replicas_of_launcher, seats_of_role


def node(address: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    """As `ray.nodes()` lists one."""
    return {"NodeManagerAddress": address, "Alive": alive, "Resources": {"CPU": 2.0, **resources}}


def test_in_the_order_of_the_file_then_by_address() -> None:
    nodes = [
        node("10.0.0.9", worker_node=1),
        node("10.0.0.10", worker_node=1),
        node("10.0.0.3", worker_node=2),
        node("10.0.0.1", main_node=1),
        node("10.0.0.4", alive=False, worker_node=1),
    ]
    seats = seats_of_role(nodes, "worker_node", ["10.0.0.10"])
    assert [(seat.address, seat.place) for seat in seats] == [
        ("10.0.0.10", 0),
        ("10.0.0.3", 0),
        ("10.0.0.3", 1),
        ("10.0.0.9", 0),
    ]
    assert seats_of_role(nodes, "shadow_node") == []


def test_a_host_that_died_and_came_back_offers_once() -> None:
    """Ray lists both: the one that is dead, and the one that it is now."""
    nodes = [node("10.0.0.2", alive=False, worker_node=1), node("10.0.0.2", worker_node=1)]
    assert seats_of_role(nodes, "worker_node") == [Seat("worker_node", "10.0.0.2")]


@given(st.lists(st.tuples(st.integers(1, 250), st.integers(0, 3)), unique_by=lambda pair: pair[0]))
def test_every_unit_is_a_seat_of_its_own(hosts: list[tuple[int, int]]) -> None:
    seats = seats_of_role([node(f"10.1.0.{n}", worker_node=k) for n, k in hosts], "worker_node")
    assert len(seats) == sum(k for _, k in hosts)
    assert len({seat.name for seat in seats}) == len(seats)


def test_the_hosts_that_the_launcher_left(tmp_path: Path) -> None:
    file = tmp_path / "ray_bootstrap_config.yaml"
    assert hosts_of_launcher(file) == {}
    assert replicas_of_launcher(file) is None
    hosts = {"main_node": "10.0.0.1", "worker_node": [{"host": "10.0.0.2", "slots": 3}]}
    file.write_text(yaml.safe_dump({"provider": {"hosts": hosts}}))
    assert replicas_of_launcher(file) is None
    file.write_text(yaml.safe_dump({"provider": {"hosts": hosts, "replicas": 2}}))
    assert hosts_of_launcher(file)["10.0.0.2"].settings == {"slots": 3}
    assert replicas_of_launcher(file) == 2
    for wrong in (True, 0, -1, "2", 1.5):
        file.write_text(yaml.safe_dump({"provider": {"hosts": hosts, "replicas": wrong}}))
        assert replicas_of_launcher(file) is None
    for text in ("provider: [", "provider: text", "provider:"):
        file.write_text(text)
        assert hosts_of_launcher(file) == {}
        assert replicas_of_launcher(file) is None


def test_the_size_of_a_group() -> None:
    def size(workers: list[Any]) -> int | None:
        return group_size(read_hosts({"main_node": "10.0.0.1", "worker_node": workers}, "here"))

    assert size([["10.0.0.2", "10.0.0.3"], ["10.0.0.4", "10.0.0.5"]]) == 2
    assert size([["10.0.0.2", "10.0.0.3"], ["10.0.0.4"]]) is None
    assert size(["10.0.0.2", "10.0.0.3"]) is None

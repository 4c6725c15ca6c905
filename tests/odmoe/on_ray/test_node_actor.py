"""What a node's actor finds out about its host, without Ray."""

from __future__ import annotations

import pytest

from odmoe.on_ray import node_actor
from odmoe.on_ray.node_actor import workers_here
from odmoe.settings.settings import Settings

HOSTS = [
    {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"main_node": 1.0, "worker_node": 1.0}},
    {"Alive": True, "NodeManagerAddress": "10.0.0.2", "Resources": {"worker_node": 3.0}},
]


@pytest.mark.parametrize(("address", "count"), [("10.0.0.1", 1), ("10.0.0.2", 3), ("10.0.0.9", 1)])
def test_workers_of_one_host_share_its_memory(address: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_actor.ray, "nodes", lambda: HOSTS)
    monkeypatch.setattr(node_actor.ray.util, "get_node_ip_address", lambda: address)
    assert workers_here(Settings(model="m", cluster="auto")) == count


def test_all_workers_of_a_local_cluster_share_this_machine() -> None:
    assert workers_here(Settings(model="m", cluster="local", workers=5)) == 5

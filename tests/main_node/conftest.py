"""Desks, where an engine is among nodes that do as they are told; and clusters of real nodes on the demo model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shadow_node.model import ShadowModel
from support.nodes.engine_world import Desk
from support.nodes.tapped_cluster import TappedCluster
from support.nodes.virtual_time import VirtualTime


@pytest.fixture
def desk_of() -> Iterator[Callable[..., Desk]]:
    """Makes desks, and closes them."""
    made: list[Desk] = []

    def build(**settings: Any) -> Desk:
        made.append(Desk(**settings))
        return made[-1]

    yield build
    for desk in made:
        desk.close()


@pytest.fixture
def desk(desk_of: Callable[..., Desk]) -> Desk:
    return desk_of()


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[Desk], VirtualTime]:
    """Takes a desk's time into the test's hand, for the engine, and for nodes that join from now on."""
    return lambda desk: VirtualTime(desk, monkeypatch)


@pytest.fixture
def cluster_of(demo_store: Callable[[str], Any]) -> Iterator[Callable[..., TappedCluster]]:
    """Makes clusters of the demo model, and closes them."""
    made: list[TappedCluster] = []

    def build(**settings: Any) -> TappedCluster:
        made.append(TappedCluster(demo_store("float32"), **settings))
        return made[-1]

    yield build
    for cluster in made:
        cluster.close()


@pytest.fixture
def cluster(cluster_of: Callable[..., TappedCluster]) -> TappedCluster:
    return cluster_of()


@pytest.fixture(scope="session")
def nf4(shadow_model: Callable[[str], ShadowModel]) -> ShadowModel:
    return shadow_model("nf4")


@pytest.fixture(scope="session")
def expected(reference: Any) -> Any:
    """Transformers' answer of eight tokens."""
    return reference("float32", 0, 8)

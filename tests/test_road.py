"""How many files a person must read to follow the product at work: real runs of the demo model, profiled.

A limit is what was found on a busy machine; whoever makes a road shorter lowers it. One that grows hides the
essential in concerns that belong on a seam: an observer of the engine, or what stands between two processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from main_node.engine.experts import RemoteExperts
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from shadow_node.passes import Passes
from support.machines.http_service import demo_model, serving
from support.road import Road, between, fewest, in_all
from worker_node.node import _Session

PROMPT = [5, 7, 9, 11]
TURNS = 5


@pytest.fixture
def road(monkeypatch: pytest.MonkeyPatch) -> Iterator[Road]:
    made = Road()
    with made.profiled():
        yield made


@pytest.fixture
def cluster(road: Road, demo_store: Callable[[str], Any], demo: Path) -> Iterator[EmbeddedCluster]:
    settings = Settings(model=str(demo), shadow="fp16", workers=4, threads=1)
    made = EmbeddedCluster(settings, demo_store("float32"))
    yield made
    made.close()


@pytest.mark.slow
def test_from_a_gate_to_its_layers_output(
    road: Road, cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortest: all experts that the gate chose were predicted, and are loaded."""
    roads = between(road, (RemoteExperts, "compute"), None, monkeypatch.setattr)
    list(cluster.generate(PROMPT, 24, ignore_eos=True))
    assert len(fewest(roads)) <= 49, fewest(roads)


@pytest.mark.slow
def test_from_a_prediction_to_its_load(road: Road, cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    roads = between(road, (Passes, "_predict"), (_Session, "_load"), monkeypatch.setattr)
    list(cluster.generate(PROMPT, 24, ignore_eos=True))
    assert len(fewest(roads)) <= 30, fewest(roads)


def test_from_a_prompt_to_its_first_token(road: Road, cluster: EmbeddedCluster) -> None:
    roads = []
    for _ in range(TURNS):
        road.begin()
        answer = cluster.main.generate(PROMPT, 2, ignore_eos=True)
        next(answer)
        roads.append(road.end())
        list(answer)
    assert len(in_all(roads)) <= 84, in_all(roads)


def test_from_a_request_to_its_first_streamed_token(road: Road, demo_store: Callable[[str], Any]) -> None:
    roads = []
    with demo_model(demo_store("float32")) as model, serving(model) as served, served.client() as client:
        for _ in range(TURNS):
            road.begin()
            stream = client.completions.create(model="demo-moe", prompt="HAMLET", max_tokens=2, stream=True)
            next(iter(stream))
            roads.append(road.end())
            stream.close()
    assert len(in_all(roads)) <= 112, in_all(roads)

"""A shadow whose layers are divided over processes: what one process predicts, and the promises of any shadow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from shadow_node.model import ShadowModel
from shadow_node.stages.division import Part
from shadow_node.stages.first import FirstStage
from support.faults.cluster import GrpcCluster
from support.faults.shadow_parts import DividedShadow, PartProcess
from support.promises import BUSY_S, PROMPT, TOKENS, Nodes, greedy
from wire.rpc.client import connect

pytestmark = pytest.mark.system
LATE: dict[str, Any] = {"departure": "late"}
"""So that recall does not depend on when alignments come."""
BACK_S = 20.0


@pytest.fixture(scope="module")
def all_nodes(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Of a model with eight layers, which three parts can share."""
    made = Nodes(demo, tmp_path_factory.mktemp("parts") / "store", greedy(demo, PROMPT, TOKENS))
    yield made
    made.close()


@pytest.fixture
def divided(nodes: Any) -> Callable[[int], DividedShadow]:
    made: list[DividedShadow] = []

    def make(parts: int) -> DividedShadow:
        made.append(DividedShadow(parts, nodes.settings, nodes.store.path))
        nodes.later(made[-1].close)
        return made[-1]

    return make


def cluster_of(nodes: Any, shadow: DividedShadow, **settings: Any) -> GrpcCluster:
    workers = [worker.address for worker in nodes.workers]
    made = GrpcCluster(nodes.settings.replace(**settings), nodes.store, workers, shadow.address)
    nodes.later(made.close)
    return made


@pytest.mark.parametrize("parts", [2, 3])
def test_tokens_and_recall_as_of_one_shadow(parts: int, nodes: Any, answer: Any, divided: Any) -> None:
    one = nodes.cluster(shadow=True, **LATE)
    whole = answer(one)
    one.close()
    seen = answer(cluster_of(nodes, divided(parts), **LATE))
    nodes.check_same(seen)
    assert seen.report.recall_complete
    assert seen.report.recall_by_token == whole.report.recall_by_token
    held = seen.report.memory_bytes["shadow"] / whole.report.memory_bytes["shadow"]
    assert 1.0 < held < 1.1  # the embeddings are the output head, too: both ends have them


def test_two_answers_at_once(nodes: Any, divided: Any) -> None:
    cluster = cluster_of(nodes, divided(2), parallel=2)
    runs = [iter(cluster.generate(PROMPT, TOKENS)) for _ in range(2)]
    got = [[next(run).token_id for run in runs] for _ in range(TOKENS)]
    assert got == [[token, token] for token in nodes.expected]
    assert not cluster.lost
    for run in runs:
        assert [step.report.recall > 0.9 for step in run if step.report] == [True]


def test_what_a_hop_costs(nodes: Any) -> None:
    """Printed: the median time of a pass over two processes beside that of a whole model, in turns."""
    store, passes = nodes.store, 60
    there = PartProcess(1, 2, nodes.settings, store.path, [])
    nodes.later(there.close)
    to = partial(connect, there.address, "stage", deadline_s=BACK_S)
    models = [ShadowModel(store, "fp16"), FirstStage(store, "fp16", "cpu", Part(0, (1, 1)), [to])]
    models[1].reach()
    caches, times, tokens = [model.new_cache() for model in models], [[0.0], [0.0]], [[0], [0]]
    for number in range(passes):
        for model, cache, took, chosen in zip(models, caches, times, tokens, strict=True):
            began = time.perf_counter()
            chosen.append(model.forward(PROMPT if not number else [number % 90], cache))
            took.append(time.perf_counter() - began)
    assert tokens[0] == tokens[1]
    whole, divided = (median(took[10:]) for took in times)
    print(f"\na pass: whole {whole * 1e3:.2f} ms, over two processes {divided * 1e3:.2f} ms")


@pytest.mark.parametrize("fate", ["kill", "freeze"])
def test_a_part_is_gone_in_mid_answer(fate: str, nodes: Any, answer: Any, divided: Any) -> None:
    shadow = divided(2)
    cluster = cluster_of(nodes, shadow)
    nodes.check_same(answer(cluster))
    part = shadow.parts[1]
    seen = answer(cluster, {5: getattr(part, fate)})
    nodes.check_same(seen)
    assert seen.longest_gap_s < BUSY_S
    assert seen.held_back_s < BUSY_S
    assert cluster.lost.count("shadow") == 1
    part.thaw()
    if fate == "kill":
        part.restart()
    end = time.monotonic() + BACK_S
    while cluster.main.engine.peers.shadow is None:
        assert time.monotonic() < end, "the shadow has not come back"
        time.sleep(0.1)
    seen = answer(cluster)
    nodes.check_same(seen)
    assert seen.report.recall > 0.9

"""Each worker holds a part of the store: tokens are Transformers', also if one is lost; what nobody holds is named.

A part's files have holes in place of the experts that are not in it, so that one computed from them would show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.expert import ExpertArithmetic
from checkpoint.part_files import write_part
from checkpoint.store import ExpertStore
from main_node.engine.engine import Engine, Waits
from main_node.node import MainNode
from main_node.shape import model_shape
from main_node.sources import Computing
from scheduler.alignment import Alignment
from scheduler.core.groups import RoundRobin
from scheduler.core.machine import Core
from scheduler.errors import RequestFailedError
from scheduler.types import ExpertId
from shadow_node.model import ShadowModel
from shadow_node.node import Shadow
from support.cases import slow_except
from support.nodes.engine_world import WAIT_S, Later, nothing_left
from support.nodes.tapped_cluster import TappedCluster
from wire import inprocess
from wire import messages as w
from worker_node.form_choice import FormChoice
from worker_node.loaders.disk import DiskLoader
from worker_node.node import Worker

pytestmark = pytest.mark.timeout(120)
WORKERS, TOKENS, LEAVES = 4, 8, 3
WORKER_WAIT_S = 0.5
Part = frozenset[ExpertId]


class PartedCluster:
    """A main node, and workers with a part of the store each; a shadow, if given."""

    def __init__(self, store: ExpertStore, folder: Path, parts: Sequence[Part], shadow: ShadowModel | None) -> None:
        manifest = store.manifest
        hello = w.Hello(w.PROTOCOL_VERSION, manifest.model_digest, manifest.dtype, "main")
        core = Core(model_shape(store), RoundRobin(2), Alignment(), 4096)
        self.engine = Engine(core, hello, Waits(worker_s=WORKER_WAIT_S))
        arithmetic = ExpertArithmetic(manifest.config, manifest.dtype)
        self.workers: list[Worker] = []
        for number, held in enumerate(parts):
            own = write_part(store, folder / str(number), held, lambda nbytes: None)
            self.workers.append(Worker(f"w{number}", own, arithmetic, DiskLoader(own), FormChoice(slots=2)))
            self.engine.peers.add_worker(number, partial(inprocess.connect, self.workers[-1]), WAIT_S)
        self.main = MainNode(store, self.engine, Computing(torch.float32))
        self._shadow = shadow
        if shadow is not None:
            node = Shadow("shadow", shadow, manifest.model_digest, manifest.dtype)
            self.engine.peers.add_shadow(partial(inprocess.connect, node), WAIT_S)

    def answer(self, prompt: list[int], count: int, then: Callable[[], object] | None = None) -> list[int]:
        """`then` is called after a few tokens."""
        tokens = []
        for step in self.main.generate(prompt, count, ignore_eos=True):
            tokens += [step.token_id] if step.token_id is not None else []
            if then is not None and len(tokens) == LEAVES and step.report is None:
                then()
        return tokens

    def close(self) -> None:
        self.main.close()
        for worker in self.workers:
            worker.close()
        if self._shadow is not None:
            self._shadow.on_routed = None


MakeCluster = Callable[..., PartedCluster]


@pytest.fixture
def parted_of(demo_store: Callable[[str], Any], tmp_path: Path) -> Iterator[MakeCluster]:
    made: list[PartedCluster] = []

    def build(parts: Sequence[Part], shadow: ShadowModel | None = None) -> PartedCluster:
        made.append(PartedCluster(demo_store("float32"), tmp_path, parts, shadow))
        return made[-1]

    yield build
    for cluster in made:
        cluster.close()


def replicated(store: ExpertStore, replicas: int) -> list[Part]:
    """Every expert on so many workers, in turn."""
    every = [expert for expert, _ in store.experts()]
    return [
        frozenset(one for at, one in enumerate(every) if (worker - at) % WORKERS < replicas)
        for worker in range(WORKERS)
    ]


@pytest.mark.parametrize("shadowed", slow_except([False], [False, True]))
def test_tokens_are_transformers_and_a_lost_worker_changes_none(
    shadowed: bool, parted_of: MakeCluster, demo_store: Any, nf4: ShadowModel, reference: Any
) -> None:
    expected = reference("float32", 0, TOKENS)
    cluster = parted_of(replicated(demo_store("float32"), 2), nf4 if shadowed else None)
    assert cluster.answer(expected.prompt, TOKENS) == expected.tokens
    assert cluster.answer(expected.prompt, TOKENS, cluster.workers[1].close) == expected.tokens
    assert cluster.engine.core.workers == [0, 2, 3]
    assert nothing_left(cluster.engine)
    assert min(worker.loads for worker in cluster.workers) > 0


def test_what_only_a_lost_worker_held_is_named_and_other_requests_go_on(
    parted_of: MakeCluster, cluster: TappedCluster, demo_store: Any
) -> None:
    """`cluster`: all its workers hold all."""
    prompts, tokens, needs = ([5, 6, 7], [900, 31, 77]), [], []
    for prompt in prompts:
        tokens.append(cluster.answer(prompt, 2, ignore_eos=True)[0])
        needs.append({ExpertId(visit.layer, expert) for visit, some in cluster.gates.items() for expert in some})
        cluster.forget()
    alone = max(needs[1] - needs[0])
    rest = frozenset(expert for expert, _ in demo_store("float32").experts()) - {alone}
    parted = parted_of([rest, rest, frozenset({alone})])
    assert parted.answer(prompts[1], 2) == tokens[1]

    parted.workers[2].close()
    failing = Later(lambda: parted.answer(prompts[1], 2))
    assert parted.answer(prompts[0], 2) == tokens[0]
    says = (
        rf"expert {alone.expert} of layer {alone.layer} was held by worker 2 \(.*\), lost since, and by no worker that "
        rf"is connected; workers with parts of the model are missing; worker 2 did not come back within {WORKER_WAIT_S}"
    )
    with pytest.raises(RequestFailedError, match=says):
        failing.result()
    assert parted.answer(prompts[0], 2) == tokens[0]
    assert nothing_left(parted.engine)

"""Each worker holds a part of the store: the tokens are Transformers', also when one is lost; what nobody holds is named.

A part's files have zeros in place of the experts that are not in it, so that one computed from them would show.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.expert import ExpertArithmetic
from checkpoint.held import HELD, held_text
from checkpoint.manifest import DENSE, MANIFEST
from checkpoint.store import ExpertStore
from main_node.answer import collect
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
from support.nodes.engine_world import WAIT_S, Later, nothing_left
from wire import inprocess
from wire import messages as w
from worker_node.form_choice import FormChoice
from worker_node.loaders.disk import DiskLoader
from worker_node.node import Worker

pytestmark = pytest.mark.timeout(120)
WORKERS, TOKENS, LEAVES = 4, 8, 3
WORKER_WAIT_S = 0.5
Part = frozenset[ExpertId]


def make_part(store: ExpertStore, folder: Path, held: Part) -> ExpertStore:
    """A folder with the bytes of these experts alone, as a host has it."""
    folder.mkdir()
    (folder / DENSE).symlink_to(store.dense)
    os.link(store.path / MANIFEST, folder / MANIFEST)
    for layer, spec in store.manifest.layers.items():
        with (store.path / spec.file).open("rb") as whole, (folder / spec.file).open("wb") as part:
            part.truncate(os.fstat(whole.fileno()).st_size)
            for expert, blob in enumerate(spec.blobs):
                if (layer, expert) in held:
                    whole.seek(blob.offset)
                    part.seek(blob.offset)
                    part.write(whole.read(blob.length))
    (folder / HELD).write_text(held_text(held))
    return ExpertStore.open(folder)


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
            own = make_part(store, folder / str(number), held)
            self.workers.append(Worker(f"w{number}", own, arithmetic, DiskLoader(own), FormChoice(slots=2)))
            self.engine.peers.add_worker(number, partial(inprocess.connect, self.workers[-1]), WAIT_S)
        self.main = MainNode(store, self.engine, Computing(torch.float32))
        self._shadow = shadow
        if shadow is not None:
            node = Shadow("shadow", shadow, manifest.model_digest, manifest.dtype)
            self.engine.peers.add_shadow(partial(inprocess.connect, node), WAIT_S)

    def answer(self, prompt: list[int], then: Callable[[], object] | None = None) -> list[int]:
        """`then` is called after a few tokens."""
        tokens = []
        for step in self.main.generate(prompt, TOKENS, ignore_eos=True):
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
def cluster_of(demo_store: Callable[[str], Any], tmp_path: Path) -> Iterator[MakeCluster]:
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


@pytest.mark.parametrize("shadowed", [False, True])
def test_tokens_are_transformers_and_a_lost_worker_changes_none(
    shadowed: bool, cluster_of: MakeCluster, demo_store: Any, nf4: ShadowModel, reference: Any
) -> None:
    expected = reference("float32", 0, TOKENS)
    cluster = cluster_of(replicated(demo_store("float32"), 2), nf4 if shadowed else None)
    assert cluster.answer(expected.prompt) == expected.tokens
    assert cluster.answer(expected.prompt, then=cluster.workers[1].close) == expected.tokens
    assert cluster.engine.core.workers == [0, 2, 3]
    assert nothing_left(cluster.engine)
    loads = [worker.loads for worker in cluster.workers]
    assert min(loads) > 0


def test_what_only_a_lost_worker_held_is_named_and_other_requests_go_on(
    cluster_of: MakeCluster, demo_store: Any, reference: Any
) -> None:
    store = demo_store("float32")
    shape = model_shape(store)
    needs: dict[int, set[ExpertId]] = {}
    prompts = {number: reference("float32", number, TOKENS).prompt[:2] for number in (0, 4)}
    whole = cluster_of([frozenset(expert for expert, _ in store.experts())])
    compute = whole.main.experts.compute

    def noted(visit: Any, hidden: Any, index: torch.Tensor, *rest: Any, **how: Any) -> torch.Tensor:
        chosen = torch.unique(index).tolist()
        needs.setdefault(visit.request, set()).update(ExpertId(visit.layer, expert) for expert in chosen)
        return compute(visit, hidden, index, *rest, **how)

    whole.main.experts.compute = noted  # type: ignore[method-assign,assignment]
    tokens = {number: whole.answer(prompt) for number, prompt in prompts.items()}
    mine, others = needs.values()
    alone = frozenset(sorted(others - mine)[:1])
    assert alone
    assert shape.layers
    ((layer, expert),) = alone

    rest = frozenset(expert for expert, _ in store.experts()) - alone
    for child in list((whole.workers[0].store.path.parent).iterdir()):
        child.rename(child.with_name(f"whole-{child.name}"))
    cluster = cluster_of([rest, rest, alone])
    cluster.workers[2].close()
    failing = Later(lambda: cluster.answer(prompts[4]))
    assert cluster.answer(prompts[0]) == tokens[0]
    says = (
        rf"expert {expert} of layer {layer} was held by worker 2 \(.*\), lost since, and by no worker that is connected; "
        rf"workers with parts of the model are missing; worker 2 did not come back within {WORKER_WAIT_S} s"
    )
    with pytest.raises(RequestFailedError, match=says):
        failing.result()
    assert cluster.answer(prompts[0]) == tokens[0]
    assert nothing_left(cluster.engine)

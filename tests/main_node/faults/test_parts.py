"""Each worker holds a part of the store: tokens are Transformers', also if one is lost; what nobody holds is named.

A part's files have holes in place of the experts that are not in it, so that one computed from them would show.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoint.expert import ExpertArithmetic
from checkpoint.part_files import write_part
from checkpoint.store import ExpertStore
from main_node.engine import part_copies
from main_node.engine.engine import Engine, Waits
from main_node.engine.peers import Connect
from main_node.node import MainNode
from main_node.shape import model_shape
from main_node.sources import Computing
from scheduler.alignment import Alignment
from scheduler.core.groups import RoundRobin
from scheduler.core.machine import Core
from scheduler.errors import LinkError, RequestFailedError
from scheduler.types import ExpertId
from shadow_node.model import ShadowModel
from shadow_node.node import Shadow
from support.cases import slow_except
from support.models.store_making import wait_until
from support.nodes.engine_world import WAIT_S, Later, nothing_left
from support.nodes.tapped_cluster import TappedCluster
from wire import inprocess
from wire import messages as w
from wire.rpc.client import connect
from wire.rpc.server import GrpcServer
from worker_node.form_choice import FormChoice
from worker_node.loaders.disk import DiskLoader
from worker_node.node import Worker
from worker_node.part_keeper import PartKeeper

pytestmark = pytest.mark.timeout(120)
START_S, COPY_WAIT_S = 3600.0, 0.3
WORKERS, TOKENS, LEAVES = 4, 8, 3
WORKER_WAIT_S = 0.5
Part = frozenset[ExpertId]
NO_ROOM, ROOM = SimpleNamespace(f_bavail=0, f_frsize=4096), SimpleNamespace(f_bavail=1 << 30, f_frsize=4096)


class PartedCluster:
    """A main node, and workers with a part of the store each; a shadow, if given."""

    def __init__(
        self,
        store: ExpertStore,
        folder: Path,
        parts: Sequence[Part],
        shadow: ShadowModel | None = None,
        replicas: int | None = None,
        served: bool = False,
    ) -> None:
        """`replicas`: restored when a worker is lost. `served`: workers are served over gRPC."""
        manifest = store.manifest
        hello = w.Hello(w.PROTOCOL_VERSION, manifest.model_digest, manifest.dtype, "main")
        core = Core(model_shape(store), RoundRobin(2), Alignment(), 4096)
        self.engine = Engine(core, hello, Waits(worker_s=WORKER_WAIT_S))
        arithmetic = ExpertArithmetic(manifest.config, manifest.dtype)
        self.workers: list[Worker] = []
        for number, held in enumerate(parts):
            own = write_part(store, folder / str(number), held, lambda nbytes: None)
            self.workers.append(Worker(f"w{number}", own, arithmetic, DiskLoader(own), FormChoice(slots=2)))
        self._servers = [GrpcServer(worker, "worker") for worker in self.workers if served]
        if replicas is not None:
            self.engine.keep_replicas(store, replicas, START_S)
        for number, worker in enumerate(self.workers):
            to = _over_grpc(self._servers[number].address) if served else partial(inprocess.connect, worker)
            self.engine.peers.add_worker(number, to, WAIT_S)
        if self.engine.copies is not None:
            self.engine.copies._holdings._first = 0.0  # all have started
        self.main = MainNode(store, self.engine, Computing(torch.float32))
        self._shadow = shadow
        if shadow is not None:
            node = Shadow("shadow", shadow, manifest.model_digest, manifest.dtype)
            self.engine.peers.add_shadow(partial(inprocess.connect, node), WAIT_S)

    def lose(self, number: int) -> None:
        if self._servers:
            self._servers[number].close(0.1)
        else:
            self.engine.peers.drop(number, LinkError("its cable was pulled"))
        self.workers[number].close()
        wait_until(lambda: number not in self.engine.peers.workers)

    @property
    def lines(self) -> list[str]:
        """What the main node says of its nodes."""
        return self.engine.peers.membership.since(0)[1]

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
        for server in self._servers:
            server.close(0.1)
        for worker in self.workers:
            worker.close()
        if self._shadow is not None:
            self._shadow.on_routed = None


def _over_grpc(address: str) -> Connect:
    return lambda handler: connect(address, "worker", handler, deadline_s=WAIT_S)


MakeCluster = Callable[..., PartedCluster]


@pytest.fixture
def parted_of(demo_store: Callable[[str], Any], tmp_path: Path) -> Iterator[MakeCluster]:
    made: list[PartedCluster] = []

    def build(parts: Sequence[Part], *how: Any, store: ExpertStore | None = None, **more: Any) -> PartedCluster:
        made.append(PartedCluster(store or demo_store("float32"), tmp_path / "parts", parts, *how, **more))
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
    assert cluster.answer(expected.prompt, TOKENS, lambda: cluster.lose(1)) == expected.tokens
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

    parted.lose(2)
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


# --- copies after a loss ----------------------------------------------------------------------------------------------


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost worker is waited for as long as `COPY_WAIT_S`, and an expert comes in three pieces, without rests."""
    monkeypatch.setattr(w, "KEEP_BYTES", 1 << 18)
    monkeypatch.setattr(part_copies, "REST", 0.0)
    monkeypatch.setattr(part_copies, "WAIT_S", COPY_WAIT_S)
    monkeypatch.setattr(part_copies, "LOOK_S", 0.02)


def holders(cluster: PartedCluster) -> Counter[int]:
    """How many of the connected workers have an expert -> how many experts."""
    live = cluster.engine.peers.workers
    return Counter(Counter(one for n in live for one in cluster.workers[n].store.held or ()).values())


@pytest.mark.parametrize("served", slow_except([False], [False, True]))
def test_one_holder_is_lost_its_experts_are_copied_and_the_other_is_lost(
    served: bool, soon: None, parted_of: MakeCluster, demo_store: Any, reference: Any
) -> None:
    expected, store = reference("float32", 0, TOKENS), demo_store("float32")
    parts = replicated(store, 2)
    cluster = parted_of(parts, replicas=2, served=served)
    assert cluster.answer(expected.prompt, TOKENS, lambda: cluster.lose(1)) == expected.tokens
    wait_until(lambda: holders(cluster) == {2: 64})
    wait_until(lambda: any("copied to workers" in line for line in cluster.lines))
    assert [line for line in cluster.lines if "copied" in line] == [
        "32 experts have lost holders; they are copied to other workers",
        f"32 experts ({32 * store.manifest.blob_bytes / 1e9:.3g} GB) were copied to workers that hold them from now on",
    ]
    given = [len(cluster.workers[n].store.held or ()) - 32 for n in (0, 2, 3)]
    assert sum(given) == 32
    assert max(given) - min(given) <= 1
    for number in (0, 2, 3):
        again = ExpertStore.open(cluster.workers[number].store.path)
        assert again.held == cluster.workers[number].store.held
        assert again.verify().blobs == len(again.held or ())
    cluster.lose(2)
    assert cluster.answer(expected.prompt, TOKENS) == expected.tokens


def test_what_nobody_holds_any_more_comes_from_the_main_node(
    soon: None, parted_of: MakeCluster, demo_store: Any, reference: Any
) -> None:
    expected = reference("float32", 0, TOKENS)
    cluster = parted_of(replicated(demo_store("float32"), 1), replicas=1)
    cluster.lose(3)
    wait_until(lambda: holders(cluster) == {1: 64})
    assert cluster.answer(expected.prompt, TOKENS) == expected.tokens


def test_a_damaged_source_and_a_worker_without_room_are_named_and_the_rest_is_copied(
    soon: None, monkeypatch: pytest.MonkeyPatch, parted_of: MakeCluster, demo_store: Any, tmp_path: Path
) -> None:
    own = ExpertStore.open(Path(shutil.copytree(demo_store("float32").path, tmp_path / "own")))
    cluster = parted_of(replicated(own, 2), replicas=2, store=own)
    damaged = min(cluster.workers[1].store.held or ())
    file, blob = own.locate(*damaged)
    with file.open("r+b") as stream:
        stream.seek(blob.offset)
        stream.write(bytes(64))
    monkeypatch.setattr(os, "statvfs", lambda path: NO_ROOM if path == cluster.workers[0].store.path else ROOM)
    cluster.lose(1)
    wait_until(lambda: holders(cluster) == {1: 1, 2: 63})
    said = "\n".join(cluster.lines)
    assert f"expert {damaged.expert} of layer {damaged.layer} cannot be copied to other workers: it fails its" in said
    assert str(file) in said
    assert re.search(r"worker 0 takes no copy of expert \d+ of layer \d+: DoesNotFitError: .* has 0.00 GB free", said)
    assert cluster.workers[0].store.held == ExpertStore.open(cluster.workers[0].store.path).held
    assert len(cluster.workers[0].store.held or ()) == 32


def test_a_store_that_cannot_be_read_for_a_while_is_tried_again(
    soon: None, monkeypatch: pytest.MonkeyPatch, parted_of: MakeCluster, demo_store: Any
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    cluster = parted_of(replicated(demo_store("float32"), 2), replicas=2)
    with monkeypatch.context() as patch:
        patch.setattr(part_copies, "open_direct", fail)
        cluster.lose(1)
        wait_until(lambda: sum("Too many open files" in line for line in cluster.lines) == 32)
        assert holders(cluster) == {1: 32, 2: 32}
    monkeypatch.setattr(part_copies, "REFUSED_S", 0.0)
    wait_until(lambda: holders(cluster) == {2: 64})


def test_the_length_of_pieces_follows_full_ones_alone(parted_of: MakeCluster, demo_store: Any) -> None:
    copies = parted_of(replicated(demo_store("float32"), 2), replicas=2).engine.copies
    assert copies is not None
    least, slow_s = part_copies.LEAST_BYTES, 10 * part_copies.PIECE_S

    def after(length: int, took_s: float, last: bool = False) -> int:
        copies._learn(w.Keep(1, 0, 0, "", 0, bytes(length), last), took_s)
        return copies._length

    assert after(least, 1e-6) == 2 * least
    assert after(2 * least, 1e-6) == 4 * least
    assert after(4096, slow_s) == after(4 * least, slow_s, last=True) == 4 * least
    assert after(4 * least, part_copies.PIECE_S) == 4 * least
    assert after(4 * least, slow_s) == least


def test_three_quarters_of_the_time_nothing_is_copied(
    soon: None, monkeypatch: pytest.MonkeyPatch, parted_of: MakeCluster, demo_store: Any
) -> None:
    """A disk that takes `slow_s` for a piece has three times as long for loads before the next."""
    slow_s, write = 0.05, PartKeeper._write
    began: list[tuple[int, int, float]] = []

    def slowly(self: PartKeeper, message: w.Keep) -> None:
        began.append((message.layer, message.expert, time.monotonic()))
        time.sleep(slow_s)
        write(self, message)

    monkeypatch.setattr(part_copies, "REST", 3.0)
    monkeypatch.setattr(PartKeeper, "_write", slowly)
    cluster = parted_of(replicated(demo_store("float32"), 2), replicas=2)
    cluster.lose(1)
    wait_until(lambda: len(began) >= 7)
    gaps = [at - before for (*one, before), (*other, at) in pairwise(began) if one == other]
    assert len(gaps) >= 4
    assert min(gaps) >= 4 * slow_s

"""Experts that are computed from their codes, with the kernel `fast`: in a slot, on a host, and by the main node."""

from __future__ import annotations

from collections.abc import Sequence
from queue import Queue
from threading import Semaphore
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoint.expert import ExpertArithmetic
from checkpoint.kernels import FAST
from checkpoint.native.encoding import Encoding
from checkpoint.native.encodings import ENCODINGS
from checkpoint.native.mxfp4 import Mxfp4
from checkpoint.native.row_products import MOST_ROWS
from checkpoint.sharding.source import open_source
from checkpoint.store import ExpertStore
from checkpoint.tensors import received_tensor, tensor_bytes
from main_node.checks.arbiter import Arbiter
from scheduler.types import ExpertId
from support.models import packed, published
from support.models.checkpoints import build
from support.models.store_making import shard
from support.nodes.worker_desk import hello
from wire.inprocess import connect
from wire.lent_threads import LentThreads
from wire.messages import Compute, Load, Loaded, LocalTensor
from worker_node.form_choice import FormChoice
from worker_node.host import HostPlace
from worker_node.loaders.make import make_loader
from worker_node.node import Worker
from worker_node.restorer import Restorer
from worker_node.worker_threads import WorkerThreads

WIDTH = 128


@pytest.fixture(scope="module", params=["awq", "mxfp4", "mxfp4 made here", pytest.param("fp8", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "mxfp4":
        path = published.publish_mxfp4(build("gpt_oss", hidden_size=WIDTH, intermediate_size=96), folder / "model")
        return shard(open_source(path), folder / "store")
    sizes = {"hidden_size": WIDTH, "moe_intermediate_size": 64, "intermediate_size": WIDTH}
    model = build("qwen3_moe", **sizes, num_hidden_layers=1, mlp_only_layers=[])
    if request.param == "mxfp4 made here":
        model.bfloat16().save_pretrained(folder / "model")
        return shard(open_source(folder / "model"), folder / "store", experts="mxfp4")
    publish = {"awq": lambda: packed.publish_awq(model, folder / "model", group=32)}
    publish["fp8"] = lambda: published.publish_fp8(model, folder / "model", block=(32, 32))
    return shard(open_source(publish[request.param]()), folder / "store")


def test_few_rows_are_computed_without_a_restored_expert(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = store.manifest
    if isinstance(ENCODINGS[manifest.encoding], Mxfp4) and not torch.cpu.get_capabilities().get("avx2"):
        pytest.skip("there is no product with MXFP4 for this processor")
    exact, fast = (ExpertArithmetic(manifest.config, manifest.dtype, *of) for of in ((), (FAST,)))
    restorer, computed = (Restorer(store, arithmetic, ("",), "cpu", 1) for arithmetic in (exact, fast))
    place, arbiter = HostPlace("host", store, fast), Arbiter(store, FAST)
    loader, slot = make_loader("memory", store), torch.zeros(manifest.blob_bytes, dtype=torch.uint8)
    restored: list[Encoding] = []
    cls = type(ENCODINGS[manifest.encoding])
    before = cls.restore_into
    monkeypatch.setattr(cls, "restore_into", lambda *of: (restored.append(of[0]), before(*of)))
    try:
        loader.prepare([slot])
        for expert in range(3):
            loader.load(0, expert, slot, lambda: False, "")
            for rows in (1, 5, MOST_ROWS):
                hidden, weights = torch.randn(rows, WIDTH).bfloat16(), torch.rand(rows).bfloat16()
                expected = restorer.compute(slot, 0, "", hidden, weights)
                restored.clear()
                found = computed.compute(slot, 0, "", hidden, weights)
                assert not restored
                torch.testing.assert_close(found, expected, rtol=0.05, atol=0.01 * float(expected.abs().max()))
                assert torch.equal(place.compute(0, expert, hidden, weights), found)
                assert torch.equal(arbiter.compute(ExpertId(0, expert), hidden, weights), found)
        assert computed.is_rowwise(slot, 0, "")
        assert computed.computes_together(0, "")
        many = MOST_ROWS + 1
        hidden, weights = torch.randn(many, WIDTH).bfloat16(), torch.rand(many).bfloat16()
        assert torch.equal(place.compute(0, 2, hidden, weights), computed.compute(slot, 0, "", hidden, weights))
        assert restored
        monkeypatch.setattr(ExpertArithmetic, "is_elementwise", lambda *_: False)
        other = Restorer(store, fast, ("",), "cpu", 1)
        assert not other.is_rowwise(slot, 0, "")
        assert not other.computes_together(0, "")
    finally:
        loader.close()
        place.close()
        arbiter.close()


def test_a_layers_experts_are_computed_in_one_go(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three experts, with bits of their own computations. One that frees its slot is computed alone."""
    manifest = store.manifest
    if isinstance(ENCODINGS[manifest.encoding], Mxfp4) and not torch.cpu.get_capabilities().get("avx2"):
        pytest.skip("there is no product with MXFP4 for this processor")
    arithmetic, lent, answers = ExpertArithmetic(manifest.config, manifest.dtype, FAST), LentThreads(), Queue[Any]()
    worker = Worker(
        "worker", store, arithmetic, make_loader("memory", store), FormChoice(slots=4), WorkerThreads(lent=lent)
    )
    together: list[int] = []
    before = Restorer.compute_together

    def watched(self: Restorer, slots: Sequence[torch.Tensor], *of: Any) -> Sequence[torch.Tensor]:
        together.append(len(slots))
        return before(self, slots, *of)

    monkeypatch.setattr(Restorer, "compute_together", watched)
    hidden = [torch.randn(rows, WIDTH).bfloat16() for rows in (1, 3, 1, 1)]
    weights = [torch.rand(len(rows)).bfloat16() for rows in hidden]
    handler = SimpleNamespace(on_message=answers.put, on_close=lambda error: None)
    try:
        session = connect(worker, handler)
        session.send(hello(store))
        answers.get(timeout=60)
        for slot in range(4):
            session.send(Load(1 + slot, slot, 0, slot))
        assert {type(answers.get(timeout=60)) for _ in range(4)} == {Loaded}
        expected = [worker.run(slot, 0, "", hidden[slot], weights[slot]) for slot in range(4)]
        with lent.lend():
            for slot in range(4):
                rows, shares = LocalTensor(hidden[slot], tensor_bytes), LocalTensor(weights[slot], tensor_bytes)
                session.send(Compute(10 + slot, slot, 0, slot, rows, shares, evict=slot == 2))
            assert lent.run_until(lambda: answers.qsize() == 4, 60)
        found = {answer.call_id: received_tensor(answer.output) for answer in (answers.get() for _ in range(4))}
        assert all(torch.equal(found[10 + slot], expected[slot]) for slot in range(4))
        assert together == [3]
    finally:
        worker.close()


def test_a_slot_that_comes_free_in_a_layers_computation_is_reported_at_once(
    store: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though another computation is ready, with whose output a small one would travel."""
    manifest = store.manifest
    if isinstance(ENCODINGS[manifest.encoding], Mxfp4) and not torch.cpu.get_capabilities().get("avx2"):
        pytest.skip("there is no product with MXFP4 for this processor")
    arithmetic, answers = ExpertArithmetic(manifest.config, manifest.dtype, FAST), Queue[Any]()
    worker = Worker("worker", store, arithmetic, make_loader("memory", store), FormChoice(slots=4))
    arrived, passed, before = Semaphore(0), Semaphore(0), worker.run

    def held(*of: Any) -> torch.Tensor:
        arrived.release()
        assert passed.acquire(timeout=60)
        return before(*of)

    monkeypatch.setattr(worker, "run", held)
    try:
        session = connect(worker, SimpleNamespace(on_message=answers.put, on_close=lambda error: None))
        session.send(hello(store))
        answers.get(timeout=60)
        for slot in range(4):
            session.send(Load(1 + slot, slot, 0, slot))
        assert {type(answers.get(timeout=60)) for _ in range(4)} == {Loaded}
        for call, (slot, evict) in enumerate(((3, False), (0, False), (0, True), (1, False), (2, True)), 10):
            rows, shares = (LocalTensor(torch.ones(*shape).bfloat16(), tensor_bytes) for shape in ((1, WIDTH), (1,)))
            session.send(Compute(call, slot, 0, slot, rows, shares, evict=evict))
            if call == 10:
                assert arrived.acquire(timeout=60)
        passed.release()
        assert arrived.acquire(timeout=60), "the last one begins"
        assert [answers.get(timeout=5).call_id for _ in range(3)] == [10, 11, 12]
        passed.release()
        assert [answers.get(timeout=60).call_id for _ in range(2)] == [13, 14]
    finally:
        passed.release(9)
        worker.close()

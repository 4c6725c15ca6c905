"""A worker, and a host place, on a store that keeps experts as published, beside Transformers' dequantised model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.encoded_experts import EncodedExperts
from checkpoint.expert import ExpertArithmetic
from checkpoint.kernels import FAST
from checkpoint.native import products, threads
from checkpoint.native.mxfp4 import Mxfp4
from checkpoint.native.parameters import ExpertParameters, restoring_bytes
from checkpoint.sharding.form_files import add_forms
from checkpoint.sharding.source import open_source
from checkpoint.store import ExpertStore
from checkpoint.tensors import received_tensor
from main_node.checks.arbiter import Arbiter
from odmoe.clusters.configuration import check_fits, configure, resources
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from scheduler.errors import AnswerWithdrawnError, ConfigError
from scheduler.types import ExpertId
from support.models import published
from support.models.checkpoints import build
from support.models.store_making import shard
from support.nodes.damage import flip
from support.nodes.exact import answers
from support.nodes.worker_desk import Expected, WorkerDesk
from wire.messages import Evict, Load, Loaded
from worker_node.form_choice import FormChoice, choose_forms
from worker_node.host import HostPlace
from worker_node.loaders.make import make_loader
from worker_node.measure import restoring_seconds
from worker_node.restorer import Restorer

PROMPT = [5, 17, 3, 88, 41, 9, 9, 60]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build("gpt_oss", hidden_size=32, intermediate_size=96)
    return published.publish_mxfp4(model, tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> Any:
    return published.dequantised(checkpoint)


@pytest.fixture
def native(checkpoint: Path, tmp_path: Path) -> ExpertStore:
    return shard(open_source(checkpoint), tmp_path / "native")


@pytest.fixture
def native_desk(native: ExpertStore) -> Iterator[WorkerDesk]:
    made = WorkerDesk(native, ExpertArithmetic(native.manifest.config, native.manifest.dtype))
    yield made
    made.close()


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("loader", ["disk", "memory"])
def test_a_worker_computes_the_dequantised_expert(
    native_desk: WorkerDesk, native: ExpertStore, whole: Any, loader: str, slots: int
) -> None:
    worker = native_desk.worker(slots, make_loader(loader, native))
    main, expected = native_desk.welcome(worker), Expected(whole)
    for number in range(8):
        layer, expert, slot = number % 3, number % 4, number % slots
        asked = native_desk.compute(number + 1, slot, layer, expert)
        main.loads_and_computes(number + 1, asked, expected)
    manifest = native.manifest
    usage = main.usage()
    assert usage.bytes_loaded == 8 * manifest.blob_bytes < 8 * manifest.restored_bytes
    assert usage.device_bytes_max == slots * manifest.blob_bytes + restoring_bytes(manifest, ("",), "cpu", 1)


def test_an_expert_is_restored_once_in_its_slot(
    native_desk: WorkerDesk, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored: list[Any] = []
    before = Mxfp4.restore_into
    main, expected = native_desk.welcome(native_desk.worker(slots=2)), Expected(whole)
    monkeypatch.setattr(Mxfp4, "restore_into", lambda *of: (restored.append(of), before(*of)))

    def compute(call: int, slot: int, expert: int) -> None:
        asked = native_desk.compute(call, slot, 1, expert, evict=False)
        main.send(asked)
        assert expected.fits(main.next(), asked)

    for slot in (0, 1):
        main.send(Load(slot + 1, slot, 1, slot))
        assert isinstance(main.next(), Loaded)
    compute(1, 0, 0)
    compute(2, 0, 0)
    assert len(restored) == 1
    compute(3, 1, 1)
    compute(4, 0, 0)
    assert len(restored) == 3, "there is memory for one restored expert"
    main.send(Evict(0), Load(3, 0, 1, 2))
    assert isinstance(main.next(), Loaded)
    compute(5, 0, 2)
    assert len(restored) == 4, "another expert, in the same slot"


@pytest.fixture
def wide(tmp_path: Path) -> ExpertStore:
    """With weights of shapes for which products of single rows need no restored expert, where there is AMX."""
    model = build("gpt_oss", hidden_size=128, intermediate_size=96)
    return shard(open_source(published.publish_mxfp4(model, tmp_path / "published")), tmp_path / "wide")


def test_single_rows_have_the_bits_of_restored_experts(wide: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = wide.manifest
    arithmetic = ExpertArithmetic(manifest.config, manifest.dtype)
    restorer, plain = (Restorer(wide, arithmetic, ("",), "cpu", 1) for _ in range(2))
    monkeypatch.setattr(plain, "_single_rows", None)
    loader, slot = make_loader("memory", wide), torch.zeros(manifest.blob_bytes, dtype=torch.uint8)
    random, restored = torch.Generator().manual_seed(0), []
    before = Mxfp4.restore_into
    monkeypatch.setattr(Mxfp4, "restore_into", lambda *of: (restored.append(of[0]), before(*of)))
    try:
        loader.prepare([slot])
        for number in range(12):
            loader.load(0, number % 4, slot, lambda: False, "")
            hidden = torch.randn(1, 128, generator=random).to(torch.bfloat16)
            if number == 8:
                hidden[0, 3] = 2.0**-60  # an order of rounding could show
            weights = torch.rand(1, generator=random).to(torch.bfloat16)
            expected = plain.compute(slot, 0, "", hidden, weights)
            restored.clear()
            assert torch.equal(restorer.compute(slot, 0, "", hidden, weights), expected)
            if number and products.are_possible(Mxfp4(), torch.bfloat16, "cpu"):
                assert bool(restored) == (number == 8)
        hidden, weights = torch.randn(3, 128).to(torch.bfloat16), torch.rand(3).to(torch.bfloat16)
        found = restorer.compute(slot, 0, "", hidden, weights)
        assert torch.equal(found, plain.compute(slot, 0, "", hidden, weights))
    finally:
        loader.close()


def test_what_multiplies_single_rows_is_compiled_at_the_start(
    wide: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[int, int]] = []
    monkeypatch.setattr(products, "_equal", {})
    monkeypatch.setattr(products, "_compared", lambda shape, _: (compared.append(shape), True)[1])
    monkeypatch.setattr("checkpoint.native.parameters.are_possible", lambda *_: True)
    Restorer(wide, ExpertArithmetic(wide.manifest.config, wide.manifest.dtype), ("",), "cpu", 1)
    assert sorted(compared) == [(96, 128), (128, 192)]
    compared.clear()
    products._equal.clear()
    fast = ExpertArithmetic(wide.manifest.config, wide.manifest.dtype, FAST)
    Restorer(wide, fast, ("",), "cpu", 1)
    assert bool(compared) is not EncodedExperts(wide.manifest, fast).computes(0), "not if nothing uses it"


def test_a_layer_with_a_plain_weight_is_computed(tmp_path: Path) -> None:
    model = build("gpt_oss", hidden_size=128, intermediate_size=96)
    path = published.publish_mxfp4(model, tmp_path / "published", plain=("down_proj",))
    store = shard(open_source(path), tmp_path / "store")
    manifest, whole = store.manifest, published.dequantised(path)
    assert manifest.encoding == "mxfp4"
    assert "down_proj" in {spec.name for spec in manifest.layers[0].tensors}
    restorer = Restorer(store, ExpertArithmetic(manifest.config, manifest.dtype), ("",), "cpu", 1)
    loader, slot = make_loader("memory", store), torch.zeros(manifest.blob_bytes, dtype=torch.uint8)
    try:
        loader.prepare([slot])
        loader.load(0, 2, slot, lambda: False, "")
        for rows in (1, 1, 3):
            hidden, weights = torch.randn(rows, 128).to(torch.bfloat16), torch.rand(rows).to(torch.bfloat16)
            with torch.inference_mode():
                experts = whole.model.layers[0].mlp.experts
                expected = experts(hidden, torch.full((rows, 1), 2), weights.view(rows, 1))
            assert torch.equal(restorer.compute(slot, 0, "", hidden, weights), expected)
    finally:
        loader.close()


def test_single_rows_that_differ_are_restored(wide: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    arithmetic = ExpertArithmetic(wide.manifest.config, wide.manifest.dtype)
    restorer = Restorer(wide, arithmetic, ("",), "cpu", 1)
    slot = torch.zeros(wide.manifest.blob_bytes, dtype=torch.uint8)
    loader = make_loader("memory", wide)
    multiply = products.multiply
    monkeypatch.setattr(products, "is_equal", lambda *_: True)
    monkeypatch.setattr(products, "multiply", lambda *of: multiply(*of) * 1.01)
    try:
        loader.prepare([slot])
        loader.load(0, 0, slot, lambda: False, "")
        hidden, weights = torch.randn(1, 128).to(torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
        first = restorer.compute(slot, 0, "", hidden, weights)
        assert torch.equal(restorer.compute(slot, 0, "", hidden, weights), first)
        assert restorer._single_rows is not None
        assert list(restorer._single_rows._computes.values()) in ([None], [])
    finally:
        loader.close()


def test_a_damaged_expert_is_not_computed(native_desk: WorkerDesk, native: ExpertStore, whole: Any) -> None:
    main = native_desk.welcome(native_desk.worker(loader=make_loader("disk", native)))
    flip(native, 2, 1)
    main.send(Load(1, 0, 2, 1))
    assert "expert 1 of layer 2" in main.failure("CorruptStoreError", load_id=1).message
    asked = native_desk.compute(1, 1, 2, 0)
    main.loads_and_computes(2, asked, Expected(whole))


def test_a_host_place_computes_the_dequantised_experts(
    native_desk: WorkerDesk, native: ExpertStore, whole: Any
) -> None:
    place = HostPlace("host", native, native_desk.arithmetic)
    try:
        main, expected = native_desk.welcome(place), Expected(whole)
        for call, expert in enumerate((0, 1, 0, 3, 3), start=1):
            asked = native_desk.compute(call, 0, 1, expert, evict=False)
            main.send(asked)
            assert expected.fits(main.next(), asked)
    finally:
        place.close()


def test_the_arbiter_computes_the_dequantised_expert(native_desk: WorkerDesk, native: ExpertStore, whole: Any) -> None:
    arbiter, asked = Arbiter(native), native_desk.compute(1, 0, 1, 2)
    hidden, weights = (received_tensor(one) for one in (asked.hidden, asked.weights))
    try:
        assert torch.equal(arbiter.compute(ExpertId(1, 2), hidden, weights), Expected(whole)(asked))
    finally:
        arbiter.close()


def test_restoring_is_part_of_what_the_full_form_costs(native_desk: WorkerDesk, native: ExpertStore) -> None:
    restorer = Restorer(native, native_desk.arithmetic, ("",), "cpu", 1)
    loader = make_loader("memory", native)
    slot = torch.zeros(native.manifest.blob_bytes, dtype=torch.uint8)
    try:
        loader.prepare([slot])
        assert restoring_seconds(restorer, loader, slot, 0, "") > 0
    finally:
        loader.close()
    formed = add_forms(native, ("int2",))
    choice = choose_forms(
        formed,
        native_desk.arithmetic,
        make_loader("memory", formed, forms=("", "int2")),
        FormChoice(("", "int2"), 1),
        1,
    )
    assert all(cost.restore_s > 0 for cost in choice.costs)
    assert {cost.form for cost in choice.costs} == {"", "int2"}


@pytest.fixture
def cluster_with(native: ExpertStore) -> Iterator[Callable[..., EmbeddedCluster]]:
    made: list[EmbeddedCluster] = []

    def start(**given: Any) -> EmbeddedCluster:
        settings = Settings(model=str(native.path), **({"threads": 1, "mini_batch": 4096} | given))
        made.append(EmbeddedCluster(settings, native))
        return made[-1]

    yield start
    for cluster in made:
        cluster.close()


def reference(model: Any, count: int) -> list[int]:
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None
        )
    tokens: list[int] = found[0, len(PROMPT) :].tolist()
    return tokens


@pytest.mark.parametrize(
    "given",
    [
        {"workers": 3, "shadow": "nf4"},
        {"workers": 2, "shadow": "fp16", "slots": 3, "loader": "disk", "check_loads": "all"},
        {"workers": 1, "shadow": "none", "slots": 12},
        {"workers": 2, "shadow": "none", "system": "hybrimoe", "slots": 3},
        {"workers": 3, "shadow": "none", "audit": 1.0},
        {"workers": 2, "system": "fully-cached", "device_memory": "100%"},
    ],
    ids=["shadow", "checks", "one worker", "host place", "audits", "all memory"],
)
def test_a_cluster_answers_as_the_dequantised_model(cluster_with: Any, whole: Any, given: dict[str, Any]) -> None:
    report, _ = answers(cluster_with(**given), PROMPT, 10)
    assert report.token_ids == reference(whole, 10)
    assert report.exact
    assert not report.cluster.suspects
    if given.get("audit"):
        assert report.cluster.audits > 0
    if given.get("check_loads"):
        assert report.cluster.loads_checked == 1.0


@pytest.mark.parametrize(
    "given",
    [
        {"workers": 2, "shadow": "int8"},
        pytest.param({"workers": 3, "audit": 1.0, "shadow": "none"}, marks=pytest.mark.slow),
    ],
)
def test_several_threads_restore_an_expert_of_a_cluster(
    cluster_with: Any, whole: Any, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: set[int] = set()

    def together(parts: list[Any], with_caller: bool) -> None:
        jobs.add(len(parts))
        threads.together(parts, with_caller)

    monkeypatch.setattr("checkpoint.native.encoding.together", together)
    report, _ = answers(cluster_with(threads=2, **given), PROMPT, 10)
    assert jobs == {1, 2}, "a projection has one row of scales, the other three"
    assert torch.get_num_threads() == 2
    assert report.token_ids == reference(whole, 10)
    assert report.exact
    assert not report.cluster.suspects


@pytest.mark.parametrize(("workers", "slots"), [(5, 3), (7, 2), (12, 1), (13, 1)])
def test_all_memory_holds_all_experts_of_workers_that_do_not_divide_them(
    native: ExpertStore, workers: int, slots: int
) -> None:
    settings = Settings(model=str(native.path), workers=workers, threads=1, system="fully-cached", device_memory="100%")
    check_fits(settings, native)
    assert configure(settings, native).resources.slots == slots
    with pytest.raises(ConfigError, match=r"12 slots are needed|needs \d+; give at least"):
        check_fits(settings.replace(device_memory="99%"), native)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_share_of_memory_is_one_of_the_experts(native: ExpertStore, workers: int) -> None:
    """What restores them comes on top of it; a number of bytes includes it."""
    manifest = native.manifest
    settings = Settings(model=str(native.path), workers=workers, threads=5, system="fully-cached", device_memory="100%")
    check_fits(settings, native)
    assert configure(settings, native).resources.slots == 12 // workers
    half = settings.replace(system="hybrimoe", device_memory="50%")
    assert configure(half, native).resources.slots == 6 // workers

    beside = restoring_bytes(manifest, ("",), "cpu", 5)
    exact = settings.replace(device_memory=str(manifest.expert_bytes + workers * beside))
    assert configure(exact, native).resources.slots == 12 // workers
    less = settings.replace(device_memory=str(manifest.expert_bytes + workers * beside - 1))
    with pytest.raises(ConfigError, match="12 slots are needed"):
        configure(less, native)


def test_all_experts_fit_into_all_memory_where_layers_differ(tmp_path: Path) -> None:
    """Slots are as large as the largest experts, here those of a layer in bfloat16."""
    model = build("qwen3_moe", hidden_size=256, moe_intermediate_size=128, mlp_only_layers=[0])
    path = published.publish_fp8(model, tmp_path / "model", ("model.layers.2.mlp",), (128, 128))
    store = shard(open_source(path), tmp_path / "store")
    assert store.manifest.encoding == "fp8"
    settings = Settings(model="m", workers=2, threads=1, system="fully-cached", device_memory="100%")
    assert configure(settings, store).resources.slots == 8


def test_too_little_memory_for_a_native_expert(native: ExpertStore) -> None:
    beside = restoring_bytes(native.manifest, ("",), "cpu", 1)
    least = native.manifest.blob_bytes + beside
    settings = Settings(model=str(native.path), workers=1, threads=1, residency="lru", device_memory=str(least - 1))
    with pytest.raises(ConfigError, match=f"needs {least}, {beside} of them to restore it; give at least {least}"):
        check_fits(settings, native)
    with pytest.raises(ConfigError, match=rf"needs {native.manifest.blob_bytes}; give at least 9%"):
        check_fits(settings.replace(device_memory="8%"), native)


@pytest.mark.parametrize("here", [1, 2])
def test_slots_do_not_depend_on_the_threads_of_who_counts_them(native: ExpertStore, here: int) -> None:
    settings = Settings(model=str(native.path), workers=1, threads=64, residency="lru", device_memory="4MB")
    before = torch.get_num_threads()
    torch.set_num_threads(here)
    try:
        beside = restoring_bytes(native.manifest, ("",), "cpu", 64)
        assert resources(settings, native).slots == min(12, (4_000_000 - beside) // native.manifest.blob_bytes)
    finally:
        torch.set_num_threads(before)


def test_a_long_computation_is_measured_no_more(native_desk: WorkerDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    before = Restorer.compute
    monkeypatch.setattr(Restorer, "compute", lambda *of: (asked.append(len(of[4])), before(*of))[1])
    monkeypatch.setattr("worker_node.measure.CALL_S", 0.0)
    assert native_desk.worker().costs == (0.0, 0.0)
    assert asked == [1, 1], "the first prepares, the second is measured"


def test_restoring_is_part_of_what_a_computation_costs(
    native_desk: WorkerDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a load: the slot's expert is not restored already."""
    restored: list[int] = []
    before, compute = ExpertParameters.of, Restorer.compute
    monkeypatch.setattr(ExpertParameters, "of", lambda *of: (restored.append(0), before(*of))[1])
    monkeypatch.setattr(Restorer, "compute", lambda *of: (restored.append(len(of[4])), compute(*of))[1])
    monkeypatch.setattr("worker_node.measure.CALL_S", 60.0)
    assert native_desk.worker().costs > (0.0, 0.0)
    measured = [after for rows, after in pairwise(restored) if rows > 1]
    assert len(measured) >= 1
    assert set(measured) == {0}


def test_a_lying_worker_is_named(cluster_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_with(workers=3, shadow="none", audit=1.0)
    liar = cluster._nodes[1]
    run = liar.run
    monkeypatch.setattr(liar, "run", lambda *of: run(*of) * 1.01)
    with pytest.raises(AnswerWithdrawnError, match=r"worker 1 .* gives wrong outputs"):
        list(cluster.generate(PROMPT, 60, ignore_eos=True))


def test_a_cluster_with_two_forms(native: ExpertStore, checkpoint: Path, tmp_path: Path) -> None:
    """The same answer as on a dequantised store with the same forms."""
    plain = shard(open_source(checkpoint), tmp_path / "plain", experts="dequantised")
    found = []
    for store in (native, plain):
        settings = Settings(
            model=str(store.path),
            system="hobbit",
            workers=1,
            slots=3,
            threads=1,
            smaller_forms="always",
            shadow="none",
            mini_batch=4096,
        )
        cluster = EmbeddedCluster(settings, add_forms(store, ("int4", "int2")))
        try:
            report, logits = answers(cluster, PROMPT, 8)
        finally:
            cluster.close()
        found.append((report.token_ids, torch.stack([one.flatten() for one in logits])))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])

"""Stores that keep experts as published: made, resumed, damaged, added to, and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.manifest import MANIFEST, seal
from checkpoint.native.encoding import Encoding
from checkpoint.native.parameters import ExpertParameters, restoring_bytes
from checkpoint.sharding.form_files import add_forms
from checkpoint.sharding.source import Source, open_source
from checkpoint.store import ExpertStore
from scheduler.errors import CorruptCheckpointError, CorruptStoreError, StoreMismatchError
from support.models import packed, published
from support.models.checkpoints import build
from support.models.store_making import check_refused, contents, shard, stop_after
from support.models.stored_experts import bytes_of, check_same_parameters, parameters
from support.nodes.damage import flip

Publish = Callable[[Path], Path]


def gpt_oss(path: Path) -> Path:
    return published.publish_mxfp4(build("gpt_oss", hidden_size=64, intermediate_size=96), path)


def qwen(path: Path) -> Path:
    return published.publish_fp8(build("qwen3_moe", hidden_size=256, moe_intermediate_size=128), path, (), (128, 128))


def gptq(path: Path) -> Path:
    """Two matrices of a parameter have an order of their own each."""
    model = build("qwen3_moe", hidden_size=64, moe_intermediate_size=32)
    return packed.publish_gptq(model, path, shuffled=True, group=16)


@pytest.fixture(scope="module", params=[gpt_oss, qwen, gptq], ids=["mxfp4", "fp8", "integers"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_source(request.param(tmp_path_factory.mktemp("published")))


@pytest.fixture(scope="module")
def dequantised(source: Source, tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    return shard(source, tmp_path_factory.mktemp("stores") / "dequantised", experts="dequantised")


@pytest.fixture
def native(source: Source, tmp_path: Path) -> ExpertStore:
    return shard(source, tmp_path / "native")


def test_restored_experts_are_the_dequantised_ones(native: ExpertStore, dequantised: ExpertStore) -> None:
    manifest = native.manifest
    assert manifest.encoding in ("mxfp4", "fp8", "integers")
    assert manifest.full.keys() == manifest.layers.keys()
    assert (dequantised.manifest.encoding, dequantised.manifest.full) == ("", {})
    assert manifest.restored_bytes == dequantised.manifest.blob_bytes > manifest.blob_bytes
    assert {n: manifest.restored_layout(n).tensors for n in manifest.layers} == {
        n: layer.tensors for n, layer in dequantised.manifest.layers.items()
    }
    check_same_parameters(native, dequantised)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_in_another_dtype(source: Source, tmp_path: Path, dtype: str) -> None:
    native = shard(source, tmp_path / "native", dtype)
    assert (native.manifest.dtype, bool(native.manifest.encoding)) == (dtype, True)
    check_same_parameters(native, shard(source, tmp_path / "dequantised", dtype, experts="dequantised"))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["", "int4"])
def test_threads_in_and_out_of_inference_mode_restore_in_turns(native: ExpertStore, form: str) -> None:
    """A worker's own thread is not in it; the model's, which is lent to the worker, is. Both write to one memory."""
    store = add_forms(native, ("int4",))
    layer, held = store.manifest.moe_layers[0], ExpertParameters(store.manifest, ("", "int4"), threads=1)
    for expert, infers in enumerate((True, False, True)):
        with torch.inference_mode(infers):
            found = held.of(bytes_of(store, layer, expert, form), layer, form)
        expected = parameters(store, layer, expert, form)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("threads", [1, 3])
def test_memory_for_restoring_is_what_is_allocated(native: ExpertStore, dequantised: ExpertStore, threads: int) -> None:
    held = ExpertParameters(native.manifest, threads=threads)
    found = restoring_bytes(native.manifest, ("",), "cpu", threads)
    assert found == held.allocated_bytes > native.manifest.restored_bytes
    assert restoring_bytes(dequantised.manifest, ("",), "cpu", threads) == 0
    assert ExpertParameters(dequantised.manifest, threads=threads).allocated_bytes == 0


@pytest.mark.slow
def test_forms_are_those_of_the_dequantised_experts(native: ExpertStore, source: Source, tmp_path: Path) -> None:
    other = add_forms(shard(source, tmp_path / "plain", experts="dequantised"), ("int4",))
    formed = add_forms(native, ("int4",))
    assert ExpertStore.open(formed.path).manifest.forms.keys() == {"int4"}
    for layer, spec in formed.layers("int4").items():
        assert spec == other.layers("int4")[layer]
    check_same_parameters(formed, other, "int4")
    check_same_parameters(formed, other)
    formed.verify()


def test_an_interrupted_store_is_resumed(native: ExpertStore, source: Source, tmp_path: Path) -> None:
    target = tmp_path / "resumed" / "store"
    target.parent.mkdir()
    stop_after(source, target, 1)
    seen: list[str] = []
    shard(source, target, progress=lambda what, done, total: seen.append(what))
    assert "resume" in seen
    assert contents(target) == contents(native.path)


@pytest.mark.slow
def test_a_run_that_was_to_dequantise_is_not_resumed(native: ExpertStore, source: Source, tmp_path: Path) -> None:
    target = tmp_path / "other" / "store"
    target.parent.mkdir()
    with pytest.raises(KeyboardInterrupt):
        shard(source, target, progress=_interrupt_at("dense"), experts="dequantised")
    assert contents(shard(source, target).path) == contents(native.path)


def _interrupt_at(task: str) -> Callable[[str, int, int], None]:
    def progress(what: str, done: int, total: int) -> None:
        if what == task:
            raise KeyboardInterrupt

    return progress


def test_a_damaged_expert_is_named(native: ExpertStore) -> None:
    layer = native.manifest.moe_layers[0]
    flip(native, layer, 1)
    with pytest.raises(CorruptStoreError, match=f"expert 1 of layer {layer}"):
        native.verify()
    with pytest.raises(CorruptStoreError, match=f"expert 1 of layer {layer}"):
        add_forms(native, ("int4",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change"),
    [
        lambda m: m.update(encoding=""),
        lambda m: m.update(encoding="unknown"),
        lambda m: m.update(encoding=3),
        lambda m: m.update(full={}),
        lambda m: m["full"].update({"99": []}),
        lambda m: next(iter(m["full"].values())).pop(),
        lambda m: next(iter(m["full"].values()))[0]["shape"].append(1),
        lambda m: next(iter(m["full"].values()))[0]["shape"].__setitem__(0, 1 << 50),
        lambda m: next(iter(m["full"].values()))[0].update(dtype="uint8"),
        lambda m: next(iter(m["full"].values()))[0].update(offset=3),
        lambda m: next(iter(m["layers"].values()))["tensors"].pop(0),
        lambda m: next(iter(m["layers"].values()))["tensors"][0]["shape"].append(0),
        lambda m: next(iter(m["full"].values()))[-1].update(offset=1 << 40),
        lambda m: next(iter(m["full"].values()))[-1].update(offset=next(iter(m["full"].values()))[-1]["offset"] + 128),
        lambda m: next(iter(m["full"].values()))[-1].update(offset=0),
        lambda m: next(iter(m["full"].values())).append(next(iter(m["full"].values()))[-1]),
        lambda m: next(iter(m["full"].values())).reverse(),
        lambda m: next(iter(m["layers"].values()))["tensors"][-1].update(offset=0),
    ],
)
def test_a_manifest_whose_encoding_does_not_fit(native: ExpertStore, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((native.path / MANIFEST).read_text())
    change(manifest)
    (native.path / MANIFEST).write_text(json.dumps(seal(manifest)))
    check_refused(native, CorruptStoreError, MANIFEST)


def test_a_store_of_format_2(dequantised: ExpertStore) -> None:
    """As they were written before there were encodings."""
    where = dequantised.path / MANIFEST
    now = where.read_text()
    fields = json.loads(now)
    for name in ("encoding", "full", "plain_because"):
        del fields[name]
    where.write_text(json.dumps(seal(fields | {"format": 2})))
    try:
        old = ExpertStore.open(dequantised.path).manifest
        assert (old.format, old.encoding, old.full, old.layers) == (2, "", {}, dequantised.manifest.layers)
    finally:
        where.write_text(now)


def test_how_experts_are_kept_is_compared(native: ExpertStore, dequantised: ExpertStore, source: Source) -> None:
    for store in (native, dequantised):
        assert shard(source, store.path).manifest == store.manifest
    with pytest.raises(StoreMismatchError, match=r"holds native experts, not dequantised.*--experts dequantised"):
        shard(source, native.path, experts="dequantised")
    with pytest.raises(StoreMismatchError, match="holds dequantised experts, not native"):
        shard(source, dequantised.path, experts="native")


def test_a_restored_expert_that_differs_is_not_kept(
    source: Source, dequantised: ExpertStore, tmp_path: Path, monkeypatch: Any
) -> None:
    """Transformers might convert another way than this code knows."""

    def restore_into(self: Any, full: dict[str, torch.Tensor], *rest: Any) -> None:
        before(self, full, *rest)
        full["down_proj"][-1, -1] += 1

    before = Encoding.restore_into
    monkeypatch.setattr(Encoding, "restore_into", restore_into)
    store = shard(source, tmp_path / "store", experts="native")
    assert store.manifest.encoding == ""
    assert "of its first expert, restored, differs from what Transformers makes of it" in store.manifest.plain_because
    assert store.manifest.layers == dequantised.manifest.layers
    shard(source, store.path, experts="native")  # it is as native as it can be


Change = Callable[[dict[str, torch.Tensor], str], Any]
"""Of a checkpoint's tensors, and the name of a projection of its fourth expert."""


def changed_qwen(path: Path, change: Change) -> Source:
    files = open_source(qwen(path)).files
    name = next(n for n in sorted(files) if n.endswith("layers.2.mlp.experts.3.up_proj.weight"))
    weights = load_file(files[name])
    change(weights, name)
    save_file(weights, files[name], metadata={"format": "pt"})
    return open_source(path)


def _in_e5m2(weights: dict[str, torch.Tensor], name: str) -> None:
    weights[name] = weights[name].float().to(torch.float8_e5m2)


def _scales_in_bfloat16(weights: dict[str, torch.Tensor], name: str) -> None:
    weights[f"{name}_scale_inv"] = weights[f"{name}_scale_inv"].bfloat16()


@pytest.mark.slow
@pytest.mark.parametrize("change", [_in_e5m2, _scales_in_bfloat16])
def test_experts_that_differ_are_all_dequantised(tmp_path: Path, change: Change) -> None:
    source = changed_qwen(tmp_path / "model", change)
    store = shard(source, tmp_path / "store")
    assert store.manifest.encoding == ""
    assert "its experts differ" in store.manifest.plain_because
    check_same_parameters(store, shard(source, tmp_path / "dequantised", experts="dequantised"))


def test_no_part_of_experts_in_two_encodings_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the headers say: the tensors themselves are looked at, too."""
    monkeypatch.setattr("checkpoint.sharding.native_experts._check_alike", lambda *of: None)
    with pytest.raises(CorruptCheckpointError, match=r"float8_e4m3fn and torch.float8_e5m2.*--experts dequantised"):
        shard(changed_qwen(tmp_path / "model", _in_e5m2), tmp_path / "store")


def test_a_number_that_is_nan(tmp_path: Path) -> None:
    def change(weights: dict[str, torch.Tensor], name: str) -> None:
        weights[name].view(torch.uint8)[5, 7] = 0x7F

    with pytest.raises(CorruptCheckpointError, match="NaN"):
        shard(changed_qwen(tmp_path / "model", change), tmp_path / "store")


def test_a_scale_that_is_too_large_to_restore(tmp_path: Path) -> None:
    """Only of a later expert: the store can be made, with experts dequantised."""

    def change(weights: dict[str, torch.Tensor], name: str) -> None:
        weights[name].view(torch.uint8).fill_(0)
        weights[f"{name}_scale_inv"].fill_(2.0**120)

    source = changed_qwen(tmp_path / "model", change)
    with pytest.raises(CorruptCheckpointError, match=r"expert from 0 to 7 of .*layers.2.*--experts dequantised"):
        shard(source, tmp_path / "store")
    assert shard(source, tmp_path / "dequantised", experts="dequantised").manifest.encoding == ""

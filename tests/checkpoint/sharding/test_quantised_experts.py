"""Stores whose experts are quantised while they are made: beside HQQ, brute force, and Transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hqq.core.quantize import Quantizer
from transformers import AutoModelForCausalLM

from checkpoint.family import expert_parameters, experts_modules
from checkpoint.manifest import MANIFEST, Manifest, seal
from checkpoint.native.mxfp4 import VALUES
from checkpoint.quantisation import Quantisation
from checkpoint.sharding import convert
from checkpoint.sharding.form_files import add_forms
from checkpoint.sharding.quantised_experts import quantised
from checkpoint.sharding.shard import make_store
from checkpoint.sharding.source import open_source
from checkpoint.store import ExpertStore
from odmoe.api.plan_model import model_of, read_config
from odmoe.clusters.embedded import EmbeddedCluster
from odmoe.settings.settings import Settings
from scheduler.errors import CheckpointError, CorruptStoreError, StoreMismatchError, UnsupportedFormatError
from support.cases import slow_except
from support.models import gguf_files, packed, published
from support.models.checkpoints import build
from support.models.store_making import contents, shard, stop_after
from support.models.stored_experts import parameters
from support.nodes.exact import answer_of, answers

PROMPT = [5, 17, 3, 88, 41, 9, 9, 60, 2, 71, 33, 12]
LAYERS = 3
GATE_UP, DOWN = "gate_up_proj", "down_proj"


def qwen(dtype: torch.dtype = torch.bfloat16) -> Any:
    """An expert's down projection has rows of 96 inputs, which groups of 64 do not divide."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 96, "intermediate_size": 128}
    return build("qwen3_moe", **sizes, num_hidden_layers=LAYERS, mlp_only_layers=[]).to(dtype)


def saved(model: Any, path: Path) -> Path:
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model() -> Any:
    return qwen()


@pytest.fixture(scope="module")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(model, tmp_path_factory.mktemp("made") / "model")


@pytest.fixture(scope="module")
def int4(checkpoint: Path) -> ExpertStore:
    return shard(open_source(checkpoint), checkpoint.parent / "int4", experts="int4")


@pytest.fixture(scope="module")
def int8(checkpoint: Path) -> ExpertStore:
    return shard(open_source(checkpoint), checkpoint.parent / "int8", experts="int8")


@pytest.fixture(scope="module")
def mxfp4(checkpoint: Path) -> ExpertStore:
    return shard(open_source(checkpoint), checkpoint.parent / "mxfp4", experts="mxfp4")


def original(model: Any, layer: int, expert: int) -> dict[str, torch.Tensor]:
    name, module = experts_modules(model)[layer]
    return {key: value[expert].detach() for key, value in expert_parameters(name, module).items()}


def test_int4_is_hqqs(model: Any, int4: ExpertStore) -> None:
    """A scale and a minimum in float16 replace HQQ's scale and zero in float32: a hundredth of a step at most."""
    for layer, expert in ((0, 0), (LAYERS - 1, 3)):
        found = parameters(int4, layer, expert)
        for key, weight in original(model, layer, expert).items():
            group = 64 if key == GATE_UP else 32
            groups = weight.float().view(-1, group)
            numbers, meta = Quantizer.quantize(groups, nbits=4, group_size=group, axis=1, device="cpu")
            expected = Quantizer.dequantize(numbers, meta | {"compute_dtype": torch.float32})
            rounding = meta["scale"].view(-1, 1) / 100 + expected.abs().view(-1, group) * 2**-8
            assert ((found[key].float().view(-1, group) - expected.view(-1, group)).abs() <= rounding).all()


@pytest.mark.parametrize("group", [64, 128])
def test_numbers_of_int4_are_hqqs_bit_for_bit(group: int) -> None:
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(0)) * 0.02 + 1.0
    found = quantised(weight, Quantisation("int4", group))
    numbers, meta = Quantizer.quantize(weight, nbits=4, group_size=group, axis=1, bitpack=False, device="cpu")
    codes = numbers.view(24, 2, 128).to(torch.uint8)
    assert torch.equal(found["codes"], codes[:, 0] | codes[:, 1] << 4)
    assert torch.equal(found["scales"], meta["scale"].half().view(24, -1))
    assert torch.equal(found["minimums"], (-meta["zero"] * meta["scale"]).half().view(24, -1))


def test_int8_is_the_nearest_of_all_numbers() -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(1)) * 0.02
    found = quantised(weight, Quantisation("int8", 64))
    groups, scales = weight.view(8, 2, 64, 1), found["scales"].float().view(8, 2, 1, 1)
    restored = (found["codes"].float().view(8, 2, 64) - 128) * scales.squeeze(-1)
    least = (scales * torch.arange(-127.0, 128.0) - groups).abs().amin(-1)
    assert torch.equal((restored - weight.view(8, 2, 64)).abs(), least)
    largest = groups.abs().amax(2).view(8, 2) / 127
    assert ((largest <= found["scales"]) & (found["scales"] <= largest * (1 + 2**-7))).all()


@pytest.mark.parametrize("made", [qwen, lambda: build("gpt_oss", hidden_size=64, intermediate_size=96).bfloat16()])
def test_mxfp4_is_of_the_inputs_of_every_layout(made: Callable[[], Any], tmp_path: Path) -> None:
    """Each value is a number times its 32 inputs' scale, and no further from the weight than 6 is from 8."""
    model = made()
    store = shard(open_source(saved(model, tmp_path / "model")), tmp_path / "store", experts="mxfp4")
    _, module = experts_modules(model)[0]
    for key, weight in original(model, 0, 1).items():
        found = parameters(store, 0, 1)[key]
        if weight.dim() != 2:
            assert torch.equal(found, weight)
            continue
        turned = (found.t(), weight.t()) if module.is_transposed else (found, weight)
        values, weights = (one.double().reshape(-1, 32) for one in turned)
        largest = weights.abs().amax(1, keepdim=True).log2().floor().exp2()
        assert bool(((values - weights).abs() <= largest / 2).all())
        assert set((values * 4 / largest).abs().unique().tolist()) == set(VALUES)


@pytest.mark.parametrize("weights", [torch.zeros(2, 64), torch.full((2, 64), 1e-38), torch.full((2, 64), 3e38)])
def test_weights_of_any_size_have_8_bits(weights: torch.Tensor) -> None:
    found = quantised(weights, Quantisation("int8", 64))
    restored = (found["codes"].float() - 128) * found["scales"].float()
    assert torch.allclose(restored, weights, rtol=2**-7, atol=0)


def test_weights_beyond_float16_are_refused(tmp_path: Path) -> None:
    model = qwen()
    with torch.no_grad():
        experts_modules(model)[1][1].down_proj[2] *= 1e8
    path = saved(model, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"layers.1.*down_proj of expert 2 cannot be quantised to int4.*65504"):
        shard(open_source(path), tmp_path / "store", experts="int4")


def test_what_a_store_says_and_takes(int4: ExpertStore, int8: ExpertStore, mxfp4: ExpertStore) -> None:
    assert int4.manifest.described == "int4 of bfloat16, groups of 64 and 32"
    assert int8.manifest.described == "int8 of bfloat16, groups of 64 and 32"
    assert mxfp4.manifest.described == "mxfp4 of bfloat16"
    assert int4.manifest.model_digest != int8.manifest.model_digest
    held, full = (
        sum(torch.Size(t.shape).numel() * (1 if t.dtype == "uint8" else 2) for t in tensors)
        for tensors in (int4.manifest.layers[0].tensors, int4.manifest.full[0])
    )
    assert 0.25 < held / full < 0.3


@pytest.mark.parametrize(
    "changes",
    [
        {"quantised_to": "int4-7"},
        {"quantised_to": "int3-64"},
        {"quantised_to": "mxfp4-32"},
        {"quantised_to": 4},
        {"quantised_to": ""},
        {"quantised_from": ""},
        {"quantised_from": ["bfloat16"]},
    ],
)
def test_a_manifest_that_says_what_cannot_be(int4: ExpertStore, changes: dict[str, Any]) -> None:
    where = int4.path / MANIFEST
    fields = json.loads(where.read_text())
    with pytest.raises(CorruptStoreError, match="does not fit the layers"):
        Manifest.from_json(json.dumps(seal(fields | changes)), where)


def test_a_store_of_published_experts_has_the_fields_of_earlier_versions(checkpoint: Path, tmp_path: Path) -> None:
    shard(open_source(checkpoint), tmp_path / "store")
    assert "quantised" not in (tmp_path / "store" / MANIFEST).read_text()


@pytest.mark.parametrize("experts", slow_except(["int4"], ["int4", "int8", "mxfp4"]))
def test_an_answer_is_that_of_transformers_with_these_weights(
    checkpoint: Path, experts: str, request: pytest.FixtureRequest
) -> None:
    store = request.getfixturevalue(experts)
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="bfloat16", experts_implementation="eager")
    for layer, (name, module) in experts_modules(reference).items():
        for key, held in expert_parameters(name, module).items():
            for expert in range(len(held)):
                held.data[expert] = parameters(store, layer, expert)[key]
    tokens, logits = answer_of(reference, PROMPT, 8)
    cluster = EmbeddedCluster(Settings(model=str(checkpoint), workers=3, threads=1, mini_batch=4096), store)
    try:
        report, found = answers(cluster, PROMPT, 8)
    finally:
        cluster.close()
    assert report.token_ids == tokens
    assert all(torch.equal(a.flatten().float(), b.float()) for a, b in zip(found, logits, strict=True))
    assert not report.exact
    groups = "" if experts == "mxfp4" else ", groups of 64 and 32"
    assert report.inexact == [f"experts in {experts} of bfloat16{groups}"]


def test_an_interrupted_store_has_the_same_bytes(checkpoint: Path, int4: ExpertStore, tmp_path: Path) -> None:
    stop_after(open_source(checkpoint), tmp_path / "store", 2, experts="int4")
    made = make_store(open_source(checkpoint), tmp_path / "store", experts="int4-64")
    assert (made.written, made.resumed) == (True, 2)
    assert contents(tmp_path / "store") == contents(int4.path)


def test_an_interrupted_store_of_other_groups_begins_again(checkpoint: Path, tmp_path: Path) -> None:
    stop_after(open_source(checkpoint), tmp_path / "store", 2, experts="int4-64")
    assert make_store(open_source(checkpoint), tmp_path / "store", experts="int4-32").resumed == 0


def test_an_expert_at_a_time(
    checkpoint: Path, int8: ExpertStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_PART_BYTES", 1)
    assert contents(shard(open_source(checkpoint), tmp_path / "store", experts="int8").path) == contents(int8.path)


def test_fp8_is_dequantised_first(tmp_path: Path) -> None:
    source = open_source(published.publish_fp8(qwen(), tmp_path / "model"))
    plain, made = (shard(source, tmp_path / how, experts=how) for how in ("dequantised", "int8"))
    assert made.manifest.described == "int8 of fp8, groups of 64 and 32"
    weight = parameters(plain, 0, 1)[GATE_UP]
    parts = quantised(weight, Quantisation("int8", 64))
    restored = (parts["codes"].view(len(weight), 2, 64).float() - 128) * parts["scales"].float().unsqueeze(2)
    assert torch.equal(parameters(made, 0, 1)[GATE_UP], restored.view(weight.shape).bfloat16())


@pytest.mark.slow
def test_forms_are_made_of_the_quantised_experts(checkpoint: Path, tmp_path: Path) -> None:
    store = add_forms(shard(open_source(checkpoint), tmp_path / "store", experts="int8"), ["int2"])
    full, form = parameters(store, 0, 0)[DOWN].float(), parameters(store, 0, 0, "int2")[DOWN].float()
    assert 0.1 < float((full - form).norm() / full.norm()) < 0.7


def awq(path: Path) -> Path:
    return packed.publish_awq(qwen(torch.float16), path, group=32)


def gguf(path: Path) -> Path:
    return gguf_files.publish(qwen(), path.with_suffix(".gguf"), Kind.Q4_0)


def gpt_oss(path: Path) -> Path:
    return saved(build("gpt_oss", hidden_size=64, intermediate_size=64).bfloat16(), path)


def published_mxfp4(path: Path) -> Path:
    return published.publish_mxfp4(build("gpt_oss", hidden_size=64, intermediate_size=64).bfloat16(), path)


def narrow_gpt_oss(path: Path) -> Path:
    return saved(build("gpt_oss", hidden_size=64, intermediate_size=40).bfloat16(), path)


def narrow(path: Path) -> Path:
    return saved(build("qwen3_moe", hidden_size=64, moe_intermediate_size=40), path)


@pytest.mark.parametrize(
    ("publish", "words"),
    [
        pytest.param(awq, r"quantised already \(awq\).*leave it out", marks=pytest.mark.slow),
        (gguf, r"quantised already \(GGUF\).*leave it out"),
        (published_mxfp4, r"quantised already \(mxfp4\)"),
        (gpt_oss, "gpt_oss keeps its experts' weights transposed.*leave it out, give --experts mxfp4, or add a form"),
        (narrow_gpt_oss, "gpt_oss keeps its experts' weights transposed.*leave it out, or add a form"),
        (narrow, "a multiple of 32 inputs, and down_proj of qwen3_moe has 40"),
    ],
)
def test_refused_before_anything_is_written(publish: Callable[[Path], Path], words: str, tmp_path: Path) -> None:
    path = publish(tmp_path / "model")
    with pytest.raises(UnsupportedFormatError, match=words):
        shard(open_source(path), tmp_path / "store", experts="int4")
    assert not list(tmp_path.glob("*store*"))
    with pytest.raises(UnsupportedFormatError, match=words):
        plan_size(path, "int4")


@pytest.mark.parametrize("publish", [narrow, published_mxfp4])
def test_mxfp4_is_refused_by_name(publish: Callable[[Path], Path], tmp_path: Path) -> None:
    path = publish(tmp_path / "model")
    for make in (
        lambda: shard(open_source(path), tmp_path / "store", experts="mxfp4"),
        lambda: plan_size(path, "mxfp4"),
    ):
        with pytest.raises(UnsupportedFormatError, match=r"--experts mxfp4 (needs rows of a multiple of 32|is for)"):
            make()


def plan_size(path: Path, experts: str) -> Any:
    found = read_config(str(path))
    return model_of("tiny", found.fields, found.dtype, 64, experts, native_bits=found.native_bits)


@pytest.mark.parametrize("experts", ["int4", "int8", "mxfp4"])
def test_a_plan_has_as_many_bytes(checkpoint: Path, experts: str, request: pytest.FixtureRequest) -> None:
    store = request.getfixturevalue(experts)
    assert abs(plan_size(checkpoint, experts).expert_bytes - store.manifest.blob_bytes) <= 4096


def test_a_store_of_another_kind_is_refused(checkpoint: Path, int4: ExpertStore, tmp_path: Path) -> None:
    source = open_source(checkpoint)
    plain = shard(source, tmp_path / "store")
    assert shard(source, int4.path).manifest == int4.manifest
    for store, wanted, words in (
        (
            int4,
            "int4-32",
            "experts in int4 of bfloat16, groups of 64 and 32, not int4 in groups of 32.*--experts int4 --group 32",
        ),
        (int4, "int8", "not int8 in.*--experts int8 --group 64"),
        (int4, "mxfp4", "not mxfp4; .*--experts mxfp4$"),
        (int4, "native", "not native.*--experts native"),
        (plain, "int4", "holds bfloat16 experts, not int4 in groups of 64"),
    ):
        with pytest.raises(StoreMismatchError, match=words):
            shard(source, store.path, experts=wanted)

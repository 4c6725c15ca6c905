"""Dense weights in few bits: sizes, memory, files, and products by pieces of a weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from checkpoint.dense import load_dense
from checkpoint.native import encoded_linear
from checkpoint.native.encoded_linear import EncodedLinear, LinearScratch
from checkpoint.native.encodings import ENCODINGS, GGML_INTEGERS
from checkpoint.sharding.few_bits import in_few_bits
from checkpoint.sharding.source import open_source
from odmoe.api.plan_model import model_of
from odmoe.stores import prepare_store
from scheduler.errors import CorruptStoreError, StoreMismatchError
from support.models.restored_dense import restored_weights
from support.models.store_making import shard


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    """Attention, shared experts and dense layers of latent attention."""
    return tiny("deepseek_v3", "bfloat16")


@pytest.mark.parametrize(("kept", "largest_error"), [("int8", 0.006), ("int4", 0.1)])
def test_restored_weights_are_near_those_of_the_checkpoint(
    model: Path, tmp_path: Path, kept: str, largest_error: float
) -> None:
    """Half a step: of 254 in int8, whose groups have 4 standard deviations, and of 15 in int4."""
    from transformers import AutoModelForCausalLM

    store = shard(open_source(model), tmp_path / "store", dense=kept)
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    restored = restored_weights(store.dense, kept)
    assert {"lm_head.weight", "model.layers.1.mlp.shared_experts.gate_proj.weight"} <= restored.keys()
    assert not any("embed_tokens" in name or ".gate." in name for name in restored)
    for name, weight in restored.items():
        wanted = original.get_parameter(name).float()
        assert float((weight - wanted).square().mean().sqrt() / wanted.std()) < largest_error, name


def test_memory_is_that_of_the_files_and_of_the_plan(model: Path, tmp_path: Path) -> None:
    plain = shard(open_source(model), tmp_path / "plain")
    store = shard(open_source(model), tmp_path / "store", dense="int4")
    config, dtype = store.manifest.config, torch.bfloat16

    def held(folder: Path) -> int:
        found = load_dense(folder, config, dtype)
        scratch = set(map(id, getattr(found, "odmoe_scratch", torch.nn.Module()).buffers()))
        return sum(one.nbytes for one in (*found.parameters(), *found.buffers()) if id(one) not in scratch)

    saved = held(plain.dense) - held(store.dense)
    assert saved == store.manifest.dense_saved > 0
    sizes = [model_of(str(model), config, "bfloat16", 64, dense=kept).dense_bytes for kept in (None, "int4")]
    assert sizes[0] - sizes[1] == saved


def test_a_damaged_file_is_named(model: Path, tmp_path: Path) -> None:
    store = shard(open_source(model), tmp_path / "store", dense="int8")
    (file,) = store.dense.glob("encoded-*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptStoreError, match=file.name):
        store.verify()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptStoreError, match=file.name):
        load_dense(store.dense, store.manifest.config, torch.bfloat16)
    file.unlink()
    with pytest.raises(CorruptStoreError, match="lacks dense weights"):
        load_dense(store.dense, store.manifest.config, torch.bfloat16)


def test_a_store_with_another_dense_part_is_not_taken(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stores = [prepare_store(str(model), None, None, dense=kept) for kept in ("int8", None, "plain", "int8")]
    assert stores[0].path == stores[3].path != stores[1].path == stores[2].path
    with pytest.raises(StoreMismatchError, match="--dense plain"):
        prepare_store(str(model), str(stores[0].path), None, dense="plain")
    assert prepare_store(str(model), str(stores[0].path), None).manifest.dense_kept == "int8"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [8, 4])
def test_products_by_pieces_have_the_bits_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bits: int
) -> None:
    monkeypatch.setattr(encoded_linear, "PIECE_VALUES", 128 * 128)
    encoded_linear.piece_rows.cache_clear()
    random = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(500, 128, generator=random), torch.randn(500, generator=random).to(dtype)
    layer = EncodedLinear(128, 500, torch.nn.Parameter(bias, requires_grad=False))
    layer.fill(ENCODINGS[GGML_INTEGERS], in_few_bits(weight, bits), dtype)
    scratch = LinearScratch([layer])
    for count in (1, 3, 40):
        rows = torch.randn(2, count, 128, generator=random).to(dtype)
        assert torch.equal(layer(rows), functional.linear(rows, layer.weight, bias))
    assert sum(one.nbytes for one in scratch.buffers()) > 0
    encoded_linear.piece_rows.cache_clear()

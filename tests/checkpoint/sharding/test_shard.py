"""Making a store: its blobs are the parameters that Transformers loads, and what goes wrong leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from checkpoint.sharding import convert, dense_files, group
from checkpoint.sharding.shard import check_same
from checkpoint.sharding.source import open_source
from checkpoint.store import ExpertStore
from scheduler.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    MissingShardError,
    NotMoEError,
    StoreMismatchError,
    StoreWriteError,
    UnsupportedFormatError,
)
from support.models.store_making import shard

LAYOUTS = ("one file", "many files", "old names", "fused names")
FAMILIES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5_moe",
    "glm4_moe",
    "granitemoe",
    "hunyuan_v1_moe",
    "phimoe",
)
Weights = dict[str, torch.Tensor]
Rewrite = Callable[[Path, Callable[[Weights], object]], None]


def blob_of(store: ExpertStore, layer: int, expert: int) -> torch.Tensor:
    file, blob = store.locate(layer, expert)
    return torch.frombuffer(bytearray(file.read_bytes()[blob.offset :][: blob.length]), dtype=torch.uint8)


def assert_as_transformers_loads(store: ExpertStore, model: Path, dtype: torch.dtype) -> None:
    """Every expert of every layer, bit for bit; the same names, no more and no fewer."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).state_dict()
    compared = set()
    for layer, spec in store.manifest.layers.items():
        for expert in range(len(spec.blobs)):
            views = store.views(blob_of(store, layer, expert), layer)
            for name, view in views.items():
                expected = theirs[f"{spec.module}.{name}"]
                assert len(expected) == len(spec.blobs)
                assert view.dtype == dtype
                assert view.contiguous().view(torch.uint8).equal(expected[expert].contiguous().view(torch.uint8))
                compared.add(f"{spec.module}.{name}")
    assert compared == {name for name in theirs if ".experts." in name}
    store.verify()


def unchanged(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


# --- what a store holds -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_demo_is_what_transformers_loads(demo: Path, store_of: Callable[..., ExpertStore], dtype: str) -> None:
    store = store_of(demo, dtype)
    assert_as_transformers_loads(store, demo, getattr(torch, dtype))
    assert store.manifest.moe_layers == tuple(range(8))
    assert store.manifest.experts == 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_what_transformers_loads(
    layouts: dict[str, Path], store_of: Callable[..., ExpertStore], layout: str, dtype: str
) -> None:
    store = store_of(layouts[layout], dtype)
    assert_as_transformers_loads(store, layouts[layout], getattr(torch, dtype))
    assert store.manifest.dtype == dtype


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3"])
def test_every_family_is_what_transformers_loads(
    tiny: Callable[..., Path], store_of: Callable[..., ExpertStore], family: str
) -> None:
    model = tiny(family, "bfloat16")
    assert_as_transformers_loads(store_of(model), model, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_one_expert_at_a_time_is_what_transformers_loads(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """As where an expert has more than 32 MiB."""
    monkeypatch.setattr(convert, "_PART_BYTES", 1)
    parts: list[convert.Part] = []
    converting = convert.Conversion.convert

    def seen(self: convert.Conversion, part: convert.Part, tensors: Weights) -> Weights:
        parts.append(part)
        return converting(self, part, tensors)

    monkeypatch.setattr(convert.Conversion, "convert", seen)
    model = tiny(family, "bfloat16")
    store = shard(open_source(model), tmp_path / "store")
    assert_as_transformers_loads(store, model, torch.bfloat16)
    assert {(part.last - part.first, part.whole) for part in parts} == {(1, False)}
    assert len(parts) == sum(len(layer.blobs) for layer in store.manifest.layers.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_expert_at_a_time_of_every_layout(
    layouts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(convert, "_PART_BYTES", 1)
    store = shard(open_source(layouts[layout]), tmp_path / "store", "float16")
    assert_as_transformers_loads(store, layouts[layout], torch.float16)


def test_experts_that_cannot_be_told_apart_are_converted_together(
    layouts: dict[str, Path], store_of: Callable[..., ExpertStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by an operation of a family that is not known to leave experts apart."""
    monkeypatch.setattr(convert, "_PART_BYTES", 1)
    monkeypatch.setattr(group, "_leaves_rows", lambda rule: False)
    store = shard(open_source(layouts["old names"]), tmp_path / "store")
    assert store.manifest.layers == store_of(layouts["old names"], "float32").manifest.layers


def test_layouts_give_the_same_bytes(layouts: dict[str, Path], store_of: Callable[..., ExpertStore]) -> None:
    stores = [store_of(layouts[layout], "float32").manifest for layout in LAYOUTS]
    assert len({tuple(sorted(m.layers.items())) for m in stores}) == 1
    assert len({m.fingerprint for m in stores}) == len(LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_part_is_the_rest_of_the_checkpoint(
    layouts: dict[str, Path], store_of: Callable[..., ExpertStore], layout: str
) -> None:
    """Under the checkpoint's own names, in its own dtype, and not one expert among them."""
    source = open_source(layouts[layout])
    store = store_of(layouts[layout], "bfloat16")
    original: Weights = {}
    for file in source.weight_files():
        original |= load_file(file)
    found: Weights = {}
    for part in store.dense.glob("*.safetensors"):
        held = load_file(part)
        assert not found.keys() & held.keys()
        found |= held
    assert set(found) == {name for name in original if ".experts." not in name}
    for name, value in found.items():
        assert value.dtype == original[name].dtype
        assert value.equal(original[name])
    index = json.loads((store.dense / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        with safe_open(store.dense / file, framework="pt") as handle:
            assert handle.get_tensor(name).equal(found[name])
    assert set(index["weight_map"]) == set(found)
    expert_bytes = sum(v.nbytes for k, v in original.items() if ".experts." in k)
    assert sum(f.stat().st_size for f in store.dense.iterdir()) < sum(v.nbytes for v in found.values()) + 64 * 1024
    assert expert_bytes > 64 * 1024, "the model is too small for the bound above to say anything"


def test_dense_part_in_several_files(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_files, "_PART_BYTES", 5000)
    store = shard(open_source(copied), tmp_path / "store")
    parts = sorted(store.dense.glob("*.safetensors"))
    assert len(parts) > 3
    names = [name for part in parts for name in load_file(part)]
    assert sorted(names) == sorted(k for k in open_source(copied).files if ".experts." not in k)


def test_dense_part_carries_the_small_files(demo: Path, store_of: Callable[..., ExpertStore]) -> None:
    dense = store_of(demo).dense
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (dense / name).read_bytes() == (demo / name).read_bytes()


def test_checkpoint_with_a_file_named_as_ours(copied: Path, tmp_path: Path) -> None:
    (copied / "checksums.json").write_text("{}")
    shard(open_source(copied), tmp_path / "store").verify()


def test_progress_is_told_to_its_end(copied: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    shard(open_source(copied), tmp_path / "store", progress=lambda *step: seen.append(step))
    assert list(dict.fromkeys(what for what, _, _ in seen)) == ["verify", "experts", "dense"]
    assert all(0 <= done <= total for _, done, total in seen)
    for what in ("experts", "dense"):
        steps = [done for said, done, _ in seen if said == what]
        assert steps == sorted(steps)
        assert (what, steps[-1], steps[-1]) in seen


def test_again_returns_the_store_as_it_is(copied: Path, tmp_path: Path) -> None:
    store = shard(open_source(copied), tmp_path / "store")
    before = [(p, p.stat().st_mtime_ns, p.stat().st_ino) for p in unchanged(store.path)]
    assert shard(open_source(copied), tmp_path / "store").manifest == store.manifest
    assert [(p, p.stat().st_mtime_ns, p.stat().st_ino) for p in unchanged(store.path)] == before


def test_target_may_be_deep_or_an_empty_directory_or_here(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(copied)
    assert shard(source, tmp_path / "a" / "b" / "c").path == tmp_path / "a" / "b" / "c"
    (tmp_path / "empty").mkdir()
    shard(source, tmp_path / "empty").verify()
    monkeypatch.chdir(tmp_path)
    shard(source, Path("beside")).verify()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "beside", "copied", "empty"]


def test_target_may_be_a_link_or_where_we_are(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(copied)
    for name, there in (("link", "empty"), ("dangling", "missing")):
        (tmp_path / name).symlink_to(there)
    (tmp_path / "empty").mkdir()
    (tmp_path / "here").mkdir()
    shard(source, tmp_path / "link").verify()
    shard(source, tmp_path / "dangling").verify()
    assert (tmp_path / "link").is_symlink()
    assert shard(source, tmp_path / "link").path == tmp_path / "empty"
    monkeypatch.chdir(tmp_path / "here")
    shard(source, Path()).verify()
    names = ["copied", "dangling", "empty", "here", "link", "missing"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


# --- what is refused --------------------------------------------------------------------------------------------------


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    before = unchanged(folder)
    yield
    assert unchanged(folder) == before


def test_model_without_experts(tiny: Callable[..., Path], tmp_path: Path) -> None:
    with nothing_left(tmp_path), pytest.raises(NotMoEError, match="Llama"):
        shard(open_source(tiny("llama")), tmp_path / "store")


def test_model_type_that_transformers_does_not_know(copied: Path, tmp_path: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    del config["architectures"]
    for changed in (config | {"model_type": "nonesuch"}, {k: v for k, v in config.items() if k != "model_type"}):
        (copied / "config.json").write_text(json.dumps(changed))
        with nothing_left(tmp_path), pytest.raises(CheckpointError, match="model_type"):
            shard(open_source(copied), tmp_path / "store")


def test_dtype_that_we_do_not_know(copied: Path, tmp_path: Path) -> None:
    with nothing_left(tmp_path), pytest.raises(ConfigError, match="float64"):
        shard(open_source(copied), tmp_path / "store", "float64")


def test_quantised_checkpoint_is_refused_not_misread(copied: Path, tmp_path: Path) -> None:
    """Its weights without their scales would load, and mean nothing."""
    config = json.loads((copied / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm"}
    (copied / "config.json").write_text(json.dumps(config))
    with nothing_left(tmp_path), pytest.raises(UnsupportedFormatError, match="aqlm"):
        shard(open_source(copied), tmp_path / "store")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_dtype_of_the_weights_where_the_configuration_names_none(
    tiny: Callable[..., Path], tmp_path: Path, dtype: str
) -> None:
    """As in openai/gpt-oss-20b."""
    model = Path(shutil.copytree(tiny("mixtral", dtype), tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    del config["dtype"]
    (model / "config.json").write_text(json.dumps(config))
    assert shard(open_source(model), tmp_path / "store").manifest.dtype == dtype


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.experts.down_proj", "model.layers.2.mlp.gate.weight"])
def test_weights_that_are_no_numbers(
    layouts: dict[str, Path], tmp_path: Path, rewrite: Rewrite, tensor: str, value: float
) -> None:
    model = Path(shutil.copytree(layouts["fused names"], tmp_path / "model"))
    rewrite(model / "model.safetensors", lambda weights: weights[tensor].view(-1)[-1].fill_(value))
    with nothing_left(tmp_path), pytest.raises(CorruptCheckpointError, match=tensor):
        shard(open_source(model), tmp_path / "store")


@pytest.mark.parametrize("lost", ["experts.3.w2", "experts.0.w1", "experts.2.w3", "experts"])
def test_experts_that_are_missing(layouts: dict[str, Path], tmp_path: Path, rewrite: Rewrite, lost: str) -> None:
    model = Path(shutil.copytree(layouts["old names"], tmp_path / "model"))

    def drop(weights: Weights) -> None:
        for name in [n for n in weights if f"layers.1.block_sparse_moe.{lost}." in n]:
            del weights[name]

    rewrite(model / "model.safetensors", drop)
    with nothing_left(tmp_path), pytest.raises((MissingShardError, CorruptCheckpointError), match="experts"):
        shard(open_source(model), tmp_path / "store")


@pytest.mark.parametrize("layout", ["old names", "fused names"])
def test_experts_of_another_shape(layouts: dict[str, Path], tmp_path: Path, rewrite: Rewrite, layout: str) -> None:
    model = Path(shutil.copytree(layouts[layout], tmp_path / "model"))

    def cut(weights: Weights) -> None:
        name = next(n for n in weights if "layers.1." in n and ("w2" in n or "down_proj" in n))
        weights[name] = weights[name][..., :-1].contiguous()

    rewrite(model / "model.safetensors", cut)
    with nothing_left(tmp_path), pytest.raises(CorruptCheckpointError, match=r"layers\.1"):
        shard(open_source(model), tmp_path / "store")


def test_header_that_only_the_library_refuses(copied: Path, tmp_path: Path) -> None:
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"F33"', 1))
    with nothing_left(tmp_path), pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        shard(open_source(copied), tmp_path / "store")


def test_bytes_that_are_not_those_published(copied: Path, tmp_path: Path) -> None:
    (copied / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    with nothing_left(tmp_path), pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        shard(open_source(copied), tmp_path / "store")


def test_store_of_another_model_or_dtype_stays(copied: Path, tmp_path: Path, tiny: Callable[..., Path]) -> None:
    store = shard(open_source(copied), tmp_path / "store")
    with nothing_left(tmp_path):
        with pytest.raises(StoreMismatchError, match=r"another checkpoint"):
            shard(open_source(tiny("olmoe")), store.path)
        with pytest.raises(StoreMismatchError, match="float32 experts, not bfloat16"):
            shard(open_source(copied), store.path, "bfloat16")
    assert check_same(store, open_source(copied), None) is store
    store.verify()


def test_store_of_the_same_family_with_other_weights_stays(
    copied: Path, tmp_path: Path, rewrite: Callable[..., None]
) -> None:
    store = shard(open_source(copied), tmp_path / "store")
    rewrite(copied / "model.safetensors", lambda weights: [value.neg_() for value in weights.values()])
    with nothing_left(tmp_path), pytest.raises(StoreMismatchError, match=r"another checkpoint"):
        shard(open_source(copied), store.path)
    store.verify()


def test_directory_that_is_no_store_stays(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("years")
    with nothing_left(tmp_path), pytest.raises(StoreWriteError, match="work"):
        shard(open_source(copied), tmp_path / "work")
    assert (tmp_path / "work" / "thesis.tex").read_text() == "years"


def test_target_that_is_a_file_or_lies_under_one(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "file", tmp_path / "file" / "store", Path("/proc/odmoe-store")):
        with nothing_left(tmp_path), pytest.raises(StoreWriteError, match=str(target)):
            shard(open_source(copied), target)
    assert (tmp_path / "file").read_text() == "mine"

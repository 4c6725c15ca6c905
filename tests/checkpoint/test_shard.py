"""Making a store: its blobs are the parameters that Transformers loads, and what goes wrong leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from checkpoint import shard as module
from checkpoint.shard import check_same, shard
from checkpoint.source import open_source
from checkpoint.store import DENSE, MANIFEST, ExpertStore
from scheduler.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    MissingShardError,
    NotMoEError,
    StoreError,
    StoreMismatchError,
    StoreWriteError,
)

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = ("one file", "many files", "old names", "fused names")
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
    monkeypatch.setattr(module, "_DENSE_PART_BYTES", 5000)
    store = shard(open_source(copied), tmp_path / "store")
    parts = sorted(store.dense.glob("*.safetensors"))
    assert len(parts) > 3
    names = [name for part in parts for name in load_file(part)]
    assert sorted(names) == sorted(k for k in open_source(copied).files if ".experts." not in k)


def test_dense_part_carries_the_small_files(demo: Path, store_of: Callable[..., ExpertStore]) -> None:
    dense = store_of(demo).dense
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (dense / name).read_bytes() == (demo / name).read_bytes()


def test_progress_is_told_to_its_end(copied: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    shard(open_source(copied), tmp_path / "store", progress=lambda *step: seen.append(step))
    assert [what for what, _, _ in seen] == ["verify", "experts", "experts", "experts", "dense"]
    assert all(0 <= done <= total for _, done, total in seen)


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
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (copied / "config.json").write_text(json.dumps(config))
    with nothing_left(tmp_path), pytest.raises(CheckpointError, match="fp8"):
        shard(open_source(copied), tmp_path / "store")


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
        with pytest.raises(StoreMismatchError, match="float32 experts, bfloat16"):
            shard(open_source(copied), store.path, "bfloat16")
    assert check_same(store, open_source(copied), None) is store
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


# --- a disk that is full ----------------------------------------------------------------------------------------------


@contextmanager
def files_no_larger_than(nbytes: int) -> Iterator[None]:
    """The kernel refuses what is longer: what a quota does, without root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("vocab", "intermediate"), [(96, 512), (2048, 8)], ids=["experts", "dense"])
def test_file_that_the_kernel_refuses_to_make_longer(
    tiny: Callable[..., Path], tmp_path: Path, vocab: int, intermediate: int
) -> None:
    """Whether the experts' file or the dense part (which the safetensors library writes) is too long."""
    source = open_source(tiny("mixtral", vocab_size=vocab, intermediate_size=intermediate))
    with nothing_left(tmp_path), pytest.raises(StoreWriteError, match="too large"), files_no_larger_than(100_000):
        shard(source, tmp_path / "store")
    shard(source, tmp_path / "store").verify()


@pytest.mark.parametrize("where", ["fsync", "copyfile", "mkdir", "rename"])
def test_disk_full(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner = {"fsync": os, "copyfile": shutil, "mkdir": Path, "rename": Path}[where]
    with monkeypatch.context() as patch, nothing_left(tmp_path):
        patch.setattr(owner, where, full)
        with pytest.raises(StoreWriteError, match="the disk is full"):
            shard(open_source(copied), tmp_path / "store")
    shard(open_source(copied), tmp_path / "store").verify()


# --- two at once, and one that is killed ------------------------------------------------------------------------------


def faster(monkeypatch: pytest.MonkeyPatch, other: ExpertStore) -> None:
    """Another process publishes `other` just before we do."""
    publish = module._publish

    def late(partial: Path, target: Path) -> None:
        shutil.copytree(other.path, target, dirs_exist_ok=True)
        publish(partial, target)

    monkeypatch.setattr(module, "_publish", late)


@pytest.mark.parametrize("there", [False, True], ids=["no directory", "an empty directory"])
def test_another_process_was_faster(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    source = open_source(copied)
    other = shard(source, tmp_path / "other")
    if there:
        (tmp_path / "store").mkdir()
    faster(monkeypatch, other)
    shard(source, tmp_path / "store").verify()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copied", "other", "store"]


def test_another_process_was_faster_with_another_dtype(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(copied)
    other = shard(source, tmp_path / "other", "bfloat16")
    faster(monkeypatch, other)
    with pytest.raises(StoreMismatchError, match="bfloat16"):
        shard(source, tmp_path / "store", "float32")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copied", "other", "store"]


def test_two_under_one_process_id_do_not_meet(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on two machines with one shared disk."""
    source, publish, inner = open_source(copied), module._publish, []

    def second(partial: Path, target: Path) -> None:
        monkeypatch.setattr(module, "_publish", publish)
        inner.append(shard(source, target))
        publish(partial, target)

    monkeypatch.setattr(module, "_publish", second)
    outer = shard(source, tmp_path / "store")
    outer.verify()
    assert outer.manifest == inner[0].manifest
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copied", "store"]


CHILDREN = """
import os, sys
from pathlib import Path
import transformers.conversion_mapping, transformers.core_model_loading
from checkpoint import shard as module
from checkpoint.source import open_source

def run(what, target, say, go):
    original, seen = getattr(module, what), []

    def patched(*args):
        seen.append(args)
        if what == "_publish" or len(seen) == 6:
            os.write(say, b"%d\\n" % os.getpid())
            os.read(go, 1)
        return original(*args)

    setattr(module, what, patched)
    module.shard(open_source(Path(sys.argv[1])), Path(target)).verify()
    os.write(say, b"done\\n")

for what, target, say, go in zip(*[iter(sys.argv[2:])] * 4):
    if os.fork() == 0:
        code = 1
        try:
            run(what, target, int(say), int(go))
            code = 0
        except BaseException:
            os.write(int(say), b"failed\\n")
        finally:
            os._exit(code)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""


class Child:
    """A process that shards, writes its id when it has come to a call of `what`, and waits there until told to go."""

    def __init__(self, stack: ExitStack, what: str, target: Path) -> None:
        (heard, self.say), (self.wait, self.go) = os.pipe(), os.pipe()
        self.lines = stack.enter_context(os.fdopen(heard))
        stack.callback(os.close, self.go)
        self.arguments = [what, str(target), str(self.say), str(self.wait)]

    def line(self) -> str:
        return self.lines.readline().strip()


def start(stack: ExitStack, model: Path, children: list[Child]) -> subprocess.Popen[bytes]:
    """One interpreter that imports what is slow to import, then forks."""
    ends = [end for child in children for end in (child.say, child.wait)]
    process = subprocess.Popen(
        [sys.executable, "-c", CHILDREN, str(model), *(a for child in children for a in child.arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
        pass_fds=ends,
    )
    stack.enter_context(process)
    stack.callback(process.kill)
    for end in ends:
        os.close(end)
    return process


def test_two_processes_at_once_and_one_that_is_killed(copied: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        killed = Child(stack, "checksum", tmp_path / "killed")
        both = [Child(stack, "_publish", tmp_path / "store") for _ in range(2)]
        process = start(stack, copied, [killed, *both])

        os.kill(int(killed.line()), signal.SIGKILL)
        for child in both:
            assert int(child.line()) > 0
        left = [folder for folder in tmp_path.iterdir() if ".killed." in folder.name]
        assert len(left) == 1
        assert any(left[0].iterdir())
        with pytest.raises(StoreError):
            ExpertStore.open(left[0])
        assert not (tmp_path / "killed").exists()
        shard(open_source(copied), tmp_path / "killed").verify()

        for child in both:
            os.write(child.go, b"!")
        assert [child.line() for child in both] == ["done", "done"]
        assert process.wait(30) == 0
    store = ExpertStore.open(tmp_path / "store")
    store.verify()
    assert (store.path / MANIFEST).is_file()
    assert (store.path / DENSE).is_dir()
    left = sorted(p.name for p in tmp_path.iterdir() if ".partial-" not in p.name)
    assert left == ["copied", "killed", "store"]
    assert sum(".store." in p.name for p in tmp_path.iterdir()) == 0

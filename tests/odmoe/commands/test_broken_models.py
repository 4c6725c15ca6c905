"""Checkpoints and stores that are damaged, another's, or not there: one line says which file, and what to do."""

from __future__ import annotations

import hashlib
import importlib
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from checkpoint.store import ExpertStore
from support.machines.cli import CommandLine, check_one_line


def flip(file: Path, where: float = 0.5) -> None:
    with file.open("r+b") as stream:
        stream.seek(int(file.stat().st_size * where))
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4096)


def weights(model: Path) -> Path:
    return min(model.glob("*.safetensors"))


BROKEN: dict[str, tuple[Callable[[Path], object], str, list[str]]] = {
    "truncated": (lambda m: cut(weights(m)), "CorruptCheckpointError", ["model.safetensors", "bytes", "whole copy"]),
    "a bit": (lambda m: flip(weights(m)), "CorruptCheckpointError", ["model.safetensors", "SHA-256", "whole copy"]),
    "empty file": (
        lambda m: weights(m).write_bytes(b""),
        "CorruptCheckpointError",
        ["model.safetensors", "whole copy"],
    ),
    "no weights": (lambda m: weights(m).unlink(), "MissingShardError", ["model.safetensors"]),
    "no config": (lambda m: (m / "config.json").unlink(), "MissingShardError", ["has no config.json"]),
    "cut config": (lambda m: cut_text(m / "config.json"), "CorruptCheckpointError", ["config.json", "whole copy"]),
    "published tokenizer": (
        lambda m: cut_text(m / "tokenizer.json"),
        "CorruptCheckpointError",
        ["tokenizer.json", "SHA-256", "whole copy"],
    ),
    "no tokenizer": (
        lambda m: (unpublish(m), (m / "tokenizer.json").unlink()),
        "NoTokenizerError",
        ["has no tokenizer", "tokenizer.json", "published"],
    ),
    "cut tokenizer": (
        lambda m: (unpublish(m), cut_text(m / "tokenizer.json")),
        "CorruptCheckpointError",
        ["no tokenizer", "complete"],
    ),
}


def cut_text(file: Path) -> None:
    file.write_text(file.read_text()[:-60])


def unpublish(model: Path) -> None:
    (model / "SHA256SUMS").unlink()


@pytest.mark.usefixtures("no_nodes")
@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoints(name: str, cli: CommandLine, demo: Path, tmp_path: Path) -> None:
    change, kind, words = BROKEN[name]
    model = Path(shutil.copytree(demo, tmp_path / "model"))
    change(model)
    check_one_line(cli("generate", "-m", str(model), "--store", str(tmp_path / "store"), "hello"), 1, kind, words)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"], "a store was made, or begun"


@pytest.mark.usefixtures("no_nodes")
def test_a_missing_shard(cli: CommandLine, tiny: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    lost = weights(model)
    lost.unlink()
    check_one_line(
        cli("generate", "-m", str(model), "hello"), 1, "MissingShardError", [lost.name, "index.json", "whole copy"]
    )


@pytest.mark.usefixtures("no_nodes")
def test_a_dense_model(cli: CommandLine, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    words = ["LlamaForCausalLM has no experts", "give a Mixture-of-Experts checkpoint"]
    check_one_line(cli("generate", "-m", str(tmp_path / "llama"), "hello"), 1, "NotMoEError", words)


@pytest.mark.usefixtures("no_nodes")
def test_no_such_model(cli: CommandLine, demo: Path, tmp_path: Path) -> None:
    for model in (str(tmp_path / "nowhere"), str(demo / "config.json"), "nowhere"):
        check_one_line(
            cli("generate", "-m", model, "hello"), 1, "CheckpointError", [model, "not a directory", "config.json"]
        )
    check_one_line(cli("generate", "-m", "nobody/nothing", "hello"), 1, "CheckpointError", ["nobody/nothing", "Hub"])


# --- what is wrong: stores --------------------------------------------------------------------------------------------


@pytest.fixture
def store(demo_store: Callable[[str], ExpertStore], tmp_path: Path) -> Path:
    """A copy of the demo model's store, to damage."""
    return Path(shutil.copytree(demo_store("bfloat16").path, tmp_path / "store"))


def first_layer(store: Path) -> Path:
    return store / "layer-00000.experts"


STORES: dict[str, tuple[Callable[[Path], object], str, list[str]]] = {
    "truncated": (lambda s: cut(first_layer(s)), "CorruptStoreError", ["layer-00000.experts", "bytes", "again"]),
    "a bit": (lambda s: flip(first_layer(s)), "CorruptStoreError", ["of layer 0", "checksum", "again"]),
    "no layer": (lambda s: first_layer(s).unlink(), "CorruptStoreError", ["layer-00000.experts is missing", "again"]),
    "cut manifest": (lambda s: cut_text(s / "manifest.json"), "CorruptStoreError", ["manifest.json", "again"]),
    "a bit of the rest": (
        lambda s: flip(min((s / "dense").glob("*.safetensors"))),
        "CorruptStoreError",
        ["dense-00000.safetensors", "checksum", "again"],
    ),
}


@pytest.mark.usefixtures("no_nodes")
@pytest.mark.parametrize("name", STORES)
def test_broken_stores(name: str, cli: CommandLine, demo: Path, store: Path) -> None:
    change, kind, words = STORES[name]
    change(store)
    check_one_line(cli("generate", "-m", str(demo), "--store", str(store), "hello"), 1, kind, words)
    check_one_line(cli("generate", "-m", str(store), "hello"), 1, kind, words)


@pytest.mark.slow
@pytest.mark.usefixtures("no_nodes")
def test_stores_of_another(cli: CommandLine, demo: Path, tiny: Path, tmp_path: Path, store: Path) -> None:
    other = tmp_path / "other"
    assert cli("shard", str(tiny), str(other)).code == 0
    given = ["generate", "-m", str(demo), "--store"]
    check_one_line(
        cli(*given, str(other), "hello"), 1, "StoreMismatchError", [str(other), "another checkpoint", "--store"]
    )
    words = [str(store), "bfloat16", "float32", "odmoe shard"]
    check_one_line(cli(*given, str(store), "--dtype", "float32", "hello"), 1, "StoreMismatchError", words)
    check_one_line(cli("shard", str(demo), str(other)), 1, "StoreMismatchError", [str(other), "another checkpoint"])


@pytest.mark.usefixtures("no_nodes")
def test_places_that_cannot_be_written(
    cli: CommandLine, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    below = str(tmp_path / "file" / "store")
    check_one_line(cli("shard", str(demo), str(tmp_path / "file")), 1, "StoreWriteError", ["file", "another place"])
    check_one_line(cli("shard", str(demo), below), 1, "StoreWriteError", [str(tmp_path / "file"), "--store"])
    monkeypatch.setenv("XDG_CACHE_HOME", below)
    answer = cli("generate", "-m", str(demo), "hello")
    check_one_line(answer, 1, "StoreWriteError", [below, "--store", "XDG_CACHE_HOME"])


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow past a megabyte."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@pytest.mark.usefixtures("small_files")
def test_a_full_disk(cli: CommandLine, demo: Path, tmp_path: Path) -> None:
    """The store is not left half-written."""
    check_one_line(cli("shard", str(demo), str(tmp_path / "here" / "store")), 1, "StoreWriteError", [])
    assert list((tmp_path / "here").iterdir()) == []


def test_the_published_digests_are_the_demos_own(demo: Path) -> None:
    """What the test of a flipped bit rests on."""
    sums = dict(reversed(line.split()) for line in (demo / "SHA256SUMS").read_text().splitlines())
    assert sums["model.safetensors"] == hashlib.sha256((demo / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("before", ["odmoe.api.model._open_model", "odmoe.api.model.start_cluster"])
def test_a_store_that_is_removed_while_the_nodes_start(
    before: str, cli: CommandLine, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = before.rsplit(".", 1)
    began = getattr(importlib.import_module(module), name)

    def remove(*args: Any) -> Any:
        shutil.rmtree(store)
        return began(*args)

    monkeypatch.setattr(before, remove)
    answer = cli("generate", "-m", str(store), "--shadow", "none", "--workers", "1", "hello")
    check_one_line(answer, 1, "StoreNotFoundError", [str(store), "was removed while this program ran"])
    assert "Hub" not in answer.err
    assert "Repo" not in answer.err

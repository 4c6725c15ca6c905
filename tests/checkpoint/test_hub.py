"""Models by name: what is on this machine, what is fetched, and what a wrong name is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from checkpoint.hub import find_model, nearest
from checkpoint.sharding.source import open_source
from scheduler.errors import CheckpointError, UnsupportedFormatError


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The Hub cannot be reached; the names that were looked for there."""
    names: list[str] = []

    def fetch(name: str, **_: Any) -> str:
        names.append(name)
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    return names


def test_a_directory_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: list[str]
) -> None:
    (tmp_path / "models" / "small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_model("models/small") == Path("models/small")
    assert find_model("./models/none") == Path("models/none")
    assert find_model(str(tmp_path / "none")) == tmp_path / "none"
    assert offline == []


def test_a_wrong_name_is_answered_with_the_nearest_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: list[str]
) -> None:
    for name in ("demo-moe", "deep-moe"):
        (tmp_path / "models" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"the Hub cannot be reached; did you mean models/demo-moe\?"):
        find_model("models/demo-mo")
    with pytest.raises(CheckpointError, match="the Hub cannot be reached; check the name"):
        find_model("some-org/some-model")
    assert offline == ["models/demo-mo", "some-org/some-model"]
    with pytest.raises(CheckpointError, match=r"is not a directory; .*did you mean .*deep-moe\?"):
        open_source(tmp_path / "models" / "deep-mo")
    assert nearest(tmp_path / "none" / "x") is None


def test_gguf_is_named_as_what_it_is(tmp_path: Path, offline: list[str]) -> None:
    """A file, a directory of files, a repository. A checkpoint that has one beside it is a checkpoint."""
    (tmp_path / "Q4.gguf").write_bytes(b"GGUF")
    assert find_model(str(tmp_path / "Q4.gguf")) == tmp_path / "Q4.gguf"
    with pytest.raises(UnsupportedFormatError, match=r"is a directory of GGUF files; give the one .*Q4.gguf"):
        find_model(str(tmp_path))
    with pytest.raises(UnsupportedFormatError, match="repository of GGUF files"):
        find_model("someone/Mixtral-8x7B-GGUF")
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match=r"models/nothing.gguf' is a GGUF file that does not exist"):
        open_source(find_model("models/nothing.gguf"))
    assert offline == []


LISTING = {
    "openai/gpt-oss-20b": (
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        *("model-00000-of-00001.safetensors", "model-00001-of-00001.safetensors", "model.safetensors.index.json"),
        *("original/config.json", "original/dtypes.json", "original/model.safetensors", "metal/model.bin", "README.md"),
    ),
    "mistralai/one": (
        *("config.json", "consolidated.safetensors", "params.json", "tekken.json", "model.safetensors", "README.md"),
        *("consolidated.safetensors.index.json", "tokenizer.model", "SYSTEM_PROMPT.txt", "model.bf16.safetensors"),
    ),
    "qwen/old": (
        *("config.json", "qwen.tiktoken", "vocab.json", "merges.txt", "pytorch_model.bin", "tf_model.h5"),
        *("pytorch_model.bin.index.json", "model.safetensors", "onnx/model.onnx", "onnx/config.json", "model.gguf"),
    ),
}
FETCHED = {
    "openai/gpt-oss-20b": LISTING["openai/gpt-oss-20b"][:8],
    "mistralai/one": (
        *("config.json", "model.safetensors", "params.json", "SYSTEM_PROMPT.txt", "tekken.json", "tokenizer.model"),
    ),
    "qwen/old": ("config.json", "merges.txt", "model.safetensors", "qwen.tiktoken", "vocab.json"),
}
INDEXED = {"weight_map": {"a": "model-00000-of-00001.safetensors", "b": "model-00001-of-00001.safetensors"}}


@pytest.fixture
def repositories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The Hub's client, with the files of `LISTING`; the folder of snapshots."""

    def fetch(name: str, *, allow_patterns: Any = None, ignore_patterns: Any = None, **_: Any) -> str:
        folder = tmp_path / name
        for file in filter_repo_objects(LISTING[name], allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(json.dumps(INDEXED if file.endswith("model.safetensors.index.json") else {}))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    return tmp_path


@pytest.mark.parametrize("name", LISTING)
def test_only_what_is_read_is_downloaded(name: str, repositories: Path) -> None:
    folder = find_model(name)
    found = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    assert found == sorted(FETCHED[name])


def test_an_adapter_is_told_before_any_weights_are_downloaded(
    repositories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LISTING, "some/lora", ("adapter_config.json", "config.json", "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"holds an adapter \(adapter_config.json"):
        find_model("some/lora")
    assert not list(repositories.rglob("*.safetensors"))

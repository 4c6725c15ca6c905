"""Models by name: what is on this machine, what is fetched, and what a wrong name is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

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

"""Errors while a checkpoint is read that are no damage: too little memory, and other versions of libraries."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from checkpoint.dense import load_dense
from checkpoint.formats import gguf_file
from checkpoint.formats.base import PublishedFormat
from checkpoint.formats.gguf_weights import GgufWeights
from checkpoint.formats.unreadable import is_out_of_memory, unreadable
from checkpoint.sharding.source import open_source
from scheduler.errors import CorruptCheckpointError, DoesNotFitError
from support.models import gguf_files, published
from support.models.checkpoints import build
from support.models.store_making import shard


def too_large(*args: Any, **more: Any) -> torch.Tensor:
    """torch's own error."""
    return torch.empty(1 << 60, dtype=torch.uint8)


def defect(*args: Any, **more: Any) -> torch.Tensor:
    raise AttributeError("no such name")


def publish_fp8(folder: Path) -> Path:
    return published.publish_fp8(build("qwen3_moe", moe_intermediate_size=32), folder / "model")


def publish_gguf(folder: Path) -> Path:
    model = build("qwen3_moe", moe_intermediate_size=32, mlp_only_layers=[])
    return gguf_files.publish(model, folder / "model.gguf", Kind.Q8_0)


READERS: dict[str, tuple[Callable[[Path], Path], type, str]] = {
    "fp8": (publish_fp8, PublishedFormat, "dequantise"),
    "gguf": (publish_gguf, GgufWeights, "parameter"),
}


def replace(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, function: Callable[..., Any]) -> None:
    """In the class and in those that have one of their own."""
    for kind in (owner, *owner.__subclasses__()):
        if name in vars(kind):
            monkeypatch.setattr(kind, name, function)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_too_little_memory_is_no_damage(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, owner, read = READERS[name]
    replace(monkeypatch, owner, read, too_large)
    with pytest.raises(DoesNotFitError, match=r"too little memory \(.*allocate memory") as caught:
        shard(open_source(publish(tmp_path)), tmp_path / "store")
    assert "fetch" not in str(caught.value)


@pytest.mark.parametrize("name", READERS)
def test_another_error_names_both_causes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, owner, read = READERS[name]
    replace(monkeypatch, owner, read, defect)
    words = r"AttributeError: no such name; fetch it again, or, if it is whole, install the versions"
    with pytest.raises(CorruptCheckpointError, match=words):
        shard(open_source(publish(tmp_path)), tmp_path / "store")


def test_too_little_memory_for_the_dense_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = shard(open_source(publish_fp8(tmp_path)), tmp_path / "store")
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(too_large))
    with pytest.raises(DoesNotFitError, match="too little memory for the dense weights"):
        load_dense(store.dense, store.manifest.config, torch.float32)


def test_a_length_in_a_header_that_takes_all_memory_may_be_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def huge(path: Path) -> Any:
        raise MemoryError

    path = publish_gguf(tmp_path)
    monkeypatch.setattr(gguf_file, "_header", huge)
    with pytest.raises(CorruptCheckpointError, match="or there is too little memory for its header"):
        open_source(path)


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("tried to allocate 20 MiB"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.EIO, "Input/output error"), False),
        (RuntimeError("shape '[2, 3]' is invalid for input of size 5"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_errors_of_memory(error: Exception, memory: bool) -> None:
    assert is_out_of_memory(error) is memory
    assert type(unreadable("model", error)) is (DoesNotFitError if memory else CorruptCheckpointError)

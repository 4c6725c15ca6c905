"""What a damaged or foreign config.json may say, and what is then said: one named error, before anything is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from checkpoint.sharding.source import open_source
from scheduler.errors import CheckpointError
from support.models.store_making import shard


@pytest.fixture
def model(demo: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(demo, copy)
    (copy / "SHA256SUMS").unlink()
    return copy


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "abc"},
        {"num_local_experts": None},
        {"num_experts_per_tok": "two"},
        {"num_attention_heads": 0},
        {"hidden_act": "nosuch"},
        {"vocab_size": -1},
        {"dtype": "nosuch"},
        {"dtype": "float8_e4m3fn"},
        {"dtype": "float64"},
        {"num_experts_per_tok": 9},
        {"num_experts_per_tok": 0},
        {"max_position_embeddings": -5},
        {"model_type": "nosuch", "architectures": ["NoSuchForCausalLM"]},
        {"model_type": "llama"},
    ],
    ids=str,
)
def test_a_config_that_cannot_be(model: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError):
        shard(open_source(model), tmp_path / "store")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_other_weights_are_another_model(model: Path, demo: Path) -> None:
    """Same architecture, same header, other weights: another fingerprint."""
    file = model / "model.safetensors"
    data = bytearray(file.read_bytes())
    for at in range(len(data) // 2, len(data) // 2 + 500_000, 2):
        data[at] ^= 1
    file.write_bytes(data)
    assert open_source(model).fingerprint != open_source(demo).fingerprint

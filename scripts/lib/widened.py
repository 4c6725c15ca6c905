"""Copies of a checkpoint with larger experts; see `scripts.models.widen`."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

INNER = {"mixtral": "intermediate_size", "qwen3_moe": "moe_intermediate_size", "qwen2_moe": "moe_intermediate_size"}
"""What an expert's inner dimension is called, by model type."""


def widened(model: Any, times: int) -> Any:
    """A copy of a Transformers model, with experts' inner dimension `times` as long. Raises SystemExit for a model
    whose experts are not known here."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = model.config.model_type
    if kind not in INNER:
        raise SystemExit(f"the model is a {kind}; allowed: {', '.join(INNER)}")
    fields = model.config.to_dict()
    fields[INNER[kind]] *= times
    wide = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=model.dtype)
    weights = {name: _wider(name, value, times) for name, value in model.state_dict().items()}
    wide.load_state_dict(weights)
    wide.generation_config = model.generation_config
    return wide


def _wider(name: str, value: torch.Tensor, times: int) -> torch.Tensor:
    if name.endswith("experts.gate_up_proj"):  # [E, 2 I, H]: gate, then up
        return torch.cat([_padded(part, 1, times) for part in value.chunk(2, dim=1)], dim=1)
    if name.endswith("experts.down_proj"):  # [E, H, I]
        return _padded(value, 2, times)
    return value


def _padded(value: torch.Tensor, dim: int, times: int) -> torch.Tensor:
    shape = list(value.shape)
    shape[dim] *= times - 1
    return torch.cat([value, value.new_zeros(shape)], dim=dim)


def write_widened(model: Path, out: Path, times: int) -> None:
    """`out`, whole or not at all: the checkpoint with its tokenizer, and what was learned of the gates, which are the
    same."""
    from transformers import AutoModelForCausalLM

    wide = widened(AutoModelForCausalLM.from_pretrained(model, dtype="auto"), times)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        partial = Path(folder) / out.name
        wide.save_pretrained(partial)
        for file in sorted([*model.glob("token*"), *model.glob("special*")]):
            shutil.copy(file, partial)
        partial.rename(out)


def widened_copy(model: Path, times: int, folder: Path) -> Path:
    """The widened checkpoint in a folder of such, made if it is not there yet. Other weights have another path."""
    weights = hashlib.sha256()
    for file in sorted([*model.glob("*.safetensors"), model / "config.json"]):
        weights.update(file.read_bytes())
    out = folder / weights.hexdigest()[:12] / f"{model.name}-wide{times}"
    if not out.exists():
        write_widened(model, out, times)
    return out

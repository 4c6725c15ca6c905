"""A checkpoint as Transformers itself runs it, with every expert in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoint.manifest import MANIFEST
from checkpoint.sharding.source import open_source
from scheduler.errors import CheckpointError, ConfigError, DoesNotFitError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from scheduler.types import ModelSize

SPARE = 1 << 30
"""Bytes left to activations, the KV cache and everything else of the process."""


def checked_config(path: Path) -> PreTrainedConfig:
    """Check the checkpoint's files, and read its configuration. Reads headers only. Imports torch.

    Raises ConfigError for an expert store, which has no checkpoint in it, CheckpointError.
    """
    if (path / MANIFEST).is_file():
        raise ConfigError(
            f"{path} is an expert store, which Transformers cannot load; give the checkpoint it was made from, and "
            f"--store {path}"
        )
    from checkpoint.family import config_from_dict

    return config_from_dict(open_source(path).config)


def check_memory(name: str, config: PreTrainedConfig, dtype: str) -> ModelSize:
    """The model's size. Raises DoesNotFitError, with both sizes, where it does not fit in this machine's memory."""
    from checkpoint.family import parse_dtype
    from checkpoint.sizes.model_size import count
    from worker_node.loaders.slab import available_memory

    counts = count(config, parse_dtype(dtype), 1)
    needed = (counts.experts_all + counts.dense) * counts.item_bytes + SPARE
    available = available_memory()
    if needed > available:
        raise DoesNotFitError(
            f"Transformers needs {needed / 1e9:.1f} GB of memory for all of {name} in {dtype}, and "
            f"{available / 1e9:.1f} GB are available; use a machine with more memory"
        )
    return counts


def load_whole(path: Path, dtype: str) -> Any:
    """Transformers' own model with `eager` experts. Raises CheckpointError."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, experts_implementation="eager", local_files_only=True
        ).eval()
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise CheckpointError(f"Transformers cannot load {path}: {error}") from error

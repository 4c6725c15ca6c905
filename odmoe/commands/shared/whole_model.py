"""A checkpoint as Transformers itself runs it, with every expert in memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoint.formats.published import published_format
from checkpoint.manifest import MANIFEST
from checkpoint.sharding.source import Source, open_source
from odmoe.api.checks import check_early
from odmoe.clusters.process import prepare_libraries, prepare_process
from scheduler.errors import CheckpointError, ConfigError, DoesNotFitError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from odmoe.settings.settings import Settings
    from odmoe.terminal import Terminal
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
    from checkpoint.family import config_from_dict, stored_dtype

    source = open_source(path)
    config = config_from_dict(source.config)
    config.dtype = stored_dtype(config, source.dtype)
    return config


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint for whose whole model this machine has the memory."""

    path: Path
    config: PreTrainedConfig
    dtype: str
    context: int


def open_checkpoint(settings: Settings, terminal: Terminal) -> Checkpoint:
    """Check settings, files and memory before anything is loaded. Imports torch.

    Raises ConfigError, CheckpointError, DoesNotFitError.
    """
    from checkpoint.family import dtype_name, stored_dtype
    from checkpoint.hub import find_model

    prepare_process(terminal.debug)
    check_early(settings)
    path = find_model(settings.model)
    config = checked_config(path)
    dtype = settings.dtype or dtype_name(stored_dtype(config))
    context = check_memory(path.name, config, dtype).context_max
    prepare_libraries(settings.threads_a_node)
    from odmoe.clusters.devices import check_devices

    check_devices(settings)
    return Checkpoint(path, config, dtype, context)


def check_memory(name: str, config: PreTrainedConfig, dtype: str) -> ModelSize:
    """The model's size. Raises DoesNotFitError, with both sizes, if it does not fit in this machine's memory."""
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


def load_whole(path: Path, dtype: str, device: str | torch.device = "cpu") -> Any:
    """Transformers' own model, dequantised, with `eager` experts. Raises CheckpointError, DoesNotFitError if the
    device has no room for it."""
    import torch

    from checkpoint.family import auto_class, config_from_dict, is_alias, whole_config

    source = open_source(path)
    auto = auto_class(config_from_dict(source.config))
    format = published_format(source.config, path)
    try:
        how: dict[str, Any] = {"config": whole_config(source.config)} if format or is_alias(source.config) else {}
        if format:
            how["config"].quantization_config = format.loading_settings()  # asks Transformers to dequantise
        folder = path
        if source.gguf is not None:
            folder, how = path.parent, _from_gguf(source)
        model = auto.from_pretrained(
            folder, dtype=dtype, experts_implementation="eager", local_files_only=True, **how
        ).eval()
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, json.JSONDecodeError) as error:
        raise CheckpointError(f"Transformers cannot load {path}: {error}") from error
    try:
        return model if torch.device(device).type == "cpu" else model.to(device)
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(
            f"{device} has no room for all of {path.name} in {dtype}, which Transformers needs there ({error}); give "
            "--device cpu"
        ) from error


def _from_gguf(source: Source) -> dict[str, Any]:
    """What makes `from_pretrained` read this file, dequantised."""
    from transformers import GgufConfig

    from checkpoint.family import config_from_dict

    how = {"config": config_from_dict(source.config), "quantization_config": GgufConfig(dequantize=True)}
    return how | {"gguf_file": source.path.name}

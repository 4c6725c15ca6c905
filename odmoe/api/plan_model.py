"""The sizes of a model that a plan needs, from its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from checkpoint.formats.gguf_file import is_gguf, read_gguf
from checkpoint.formats.settings import quantisation_settings, without_quantisation
from checkpoint.hub import find_model
from checkpoint.sizes.configured_size import configured_size
from checkpoint.sizes.native_size import with_native_experts
from scheduler.errors import CheckpointError, MissingShardError
from scheduler.types import ModelSize

_CONFIG = "config.json"
_STORE = "manifest.json"


class Described(NamedTuple):
    """A model's configuration and, if it is a store, its experts' dtype and how it keeps them."""

    fields: dict[str, Any]
    dtype: str | None = None
    experts: str | None = None
    """`native` or `dequantised`."""


def read_config(name: str) -> Described:
    """Of a model, its config.json or a store. For a model on the Hub only config.json is fetched.

    Raises CheckpointError.
    """
    path = find_model(name, [_CONFIG])
    if (path / _STORE).is_file():
        manifest = _read(path / _STORE)
        kept = "native" if manifest.get("encoding") else "dequantised"
        return Described(manifest.get("config", {}), manifest.get("dtype"), kept)
    if is_gguf(path):
        return Described(read_gguf(path).config)
    return Described(_read(path / _CONFIG if path.is_dir() else path))


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise MissingShardError(
            f"{file} does not exist; give a model directory, its config.json, a GGUF file or a store"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); give a model's config.json") from error
    if not isinstance(found, dict) or not ("model_type" in found or "config" in found):
        raise CheckpointError(
            f"{file} is not a model's configuration, because it has no model_type; give its config.json"
        )
    return found


def model_of(
    name: str, fields: dict[str, Any], dtype: str | None, context: int, experts: str | None = None
) -> ModelSize:
    """Without torch where the configuration alone gives the sizes. `experts`: how a store keeps those of a quantised
    model; None for native.

    Raises CheckpointError, NotMoEError, UnsupportedFamilyError or ConfigError.
    """
    label = Path(name).name.removesuffix(".json") or name
    plain = without_quantisation(fields)
    if quantisation_settings(fields) and dtype is None and not (fields.get("dtype") or fields.get("torch_dtype")):
        dtype = "bfloat16"  # as published models are computed
    found = configured_size(plain, dtype, context, label) or _counted(plain, dtype, context, label)
    return found if experts == "dequantised" else with_native_experts(found, fields)


def _counted(fields: dict[str, Any], dtype: str | None, context: int, label: str) -> ModelSize:
    from checkpoint.family import config_from_dict, parse_dtype, stored_dtype
    from checkpoint.sizes.model_size import count

    config = config_from_dict(fields)
    return count(config, parse_dtype(dtype) if dtype else stored_dtype(config), context, label)

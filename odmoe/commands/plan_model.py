"""The sizes of a model that a plan needs, from its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoint.hub import find_model
from checkpoint.sizes.configured_size import configured_size
from scheduler.errors import CheckpointError, MissingShardError
from scheduler.types import ModelSize

_CONFIG = "config.json"
_STORE = "manifest.json"


def read_config(name: str) -> tuple[dict[str, Any], str | None]:
    """A model's configuration, and the dtype if it is a store. For a model on the Hub only config.json is fetched.

    Raises CheckpointError.
    """
    path = find_model(name, [_CONFIG])
    if (path / _STORE).is_file():
        manifest = _read(path / _STORE)
        return manifest.get("config", {}), manifest.get("dtype")
    return _read(path / _CONFIG if path.is_dir() else path), None


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise MissingShardError(f"{file} does not exist; give a model directory, its config.json or a store") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); give a model's config.json") from error
    if not isinstance(found, dict) or not ("model_type" in found or "config" in found):
        raise CheckpointError(
            f"{file} is not a model's configuration, because it has no model_type; give its config.json"
        )
    return found


def model_of(name: str, fields: dict[str, Any], dtype: str | None, context: int) -> ModelSize:
    """Without torch where the configuration alone gives the sizes.

    Raises CheckpointError, NotMoEError, UnsupportedFamilyError or ConfigError.
    """
    label = Path(name).name.removesuffix(".json") or name
    found = configured_size(fields, dtype, context, label)
    if found is not None:
        return found
    from checkpoint.family import config_from_dict, parse_dtype, stored_dtype
    from checkpoint.sizes.model_size import count

    config = config_from_dict(fields)
    return count(config, parse_dtype(dtype) if dtype else stored_dtype(config), context, label)

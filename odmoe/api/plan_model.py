"""The sizes of a model that a plan needs, from its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from checkpoint.formats.gguf_file import is_gguf, read_gguf
from checkpoint.formats.settings import (
    MODELOPT,
    is_surely_readable,
    names_dtype,
    quantisation_method,
    quantisation_settings,
    without_quantisation,
)
from checkpoint.hub import find_model
from checkpoint.quantisation import Quantisation
from checkpoint.sizes.configured_size import configured_size
from checkpoint.sizes.dense_size import with_encoded_dense
from checkpoint.sizes.native_size import expert_dtype, store_bits, with_native_experts, with_quantised_experts
from scheduler.errors import CheckpointError, MissingShardError
from scheduler.types import ModelSize

_CONFIG = "config.json"
_STORE = "manifest.json"
QUANTISABLE = ("fp8", "mxfp8")
"""Formats whose experts can be quantised again."""
_TRANSPOSED = ("gpt_oss",)
"""Families of `configured_size` whose experts are [inputs, outputs]; those of all others have rows of inputs."""


class Described(NamedTuple):
    """A model's configuration and, if it is a store, its experts' dtype and how it keeps them."""

    fields: dict[str, Any]
    dtype: str | None = None
    """Of a checkpoint: that of its weights, if they are there and its configuration names none."""
    experts: str | None = None
    """`native` or `dequantised`."""
    native_bits: float = 0.0
    """Of an element of a native expert, if the tensors of a store or of a GGUF file say it."""
    manifest: dict[str, Any] | None = None
    """Of a store."""


def read_config(name: str) -> Described:
    """Of a model, its config.json or a store. For a model on the Hub no weights are fetched. What `odmoe shard` would
    refuse without them is refused here, too.

    Raises CheckpointError.
    """
    path = find_model(name, [_CONFIG, MODELOPT])
    if (path / _STORE).is_file():
        manifest = _read(path / _STORE)
        kept = "native" if manifest.get("encoding") else "dequantised"
        return Described(manifest.get("config", {}), manifest.get("dtype"), kept, store_bits(manifest), manifest)
    if is_gguf(path):
        from checkpoint.formats.gguf_blocks import expert_bits  # torch

        file = read_gguf(path)
        return Described(file.config, native_bits=expert_bits(file))
    folder = path if path.is_dir() else path.parent
    fields = _read(path / _CONFIG if path.is_dir() else path)
    if not is_surely_readable(fields, folder):
        from checkpoint.family import config_from_dict
        from checkpoint.formats.published import check_format

        config_from_dict(fields)  # as in `make_store`, an unknown family comes first
        check_format(fields, folder)
    dtype = _dtype_of_weights(path, fields) if path.is_dir() else None
    if not _has_plain_experts(fields, folder):
        return Described(fields, dtype)
    return Described(without_quantisation(fields), dtype or (None if names_dtype(fields) else "bfloat16"))


def _has_plain_experts(fields: dict[str, Any], folder: Path) -> bool:
    """Whether bitsandbytes has left the experts of a checkpoint as they are, which only its tensors' names say.

    Where they are not there, it is the version of Transformers: since 5.0 experts are no linear layers, which are all
    that is quantised.
    """
    settings = quantisation_settings(fields)
    if not isinstance(settings, dict) or quantisation_method(settings) != "bitsandbytes":
        return False
    names = [name for file in sorted(folder.glob("*.safetensors")) for name in _tensors(file)]
    if names:
        return not any(".experts." in name and name.endswith((".absmax", ".SCB")) for name in names)
    return not str(fields.get("transformers_version", "")).startswith("4.")


def _tensors(file: Path) -> list[str]:
    """The names of a file's tensors; none of a damaged one, which `odmoe shard` refuses."""
    import safetensors

    try:
        with safetensors.safe_open(file, framework="numpy") as held:
            return list(held.keys())
    except (OSError, safetensors.SafetensorError):
        return []


def _dtype_of_weights(folder: Path, fields: dict[str, Any]) -> str | None:
    """That which `odmoe shard` would take, of weights that are there and a configuration without a dtype. Raises
    CheckpointError for weights that it does not read."""
    safe, others = (any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))
    if (names_dtype(fields) or not safe) and (safe or not others):
        return None
    from checkpoint.sharding.source import open_source  # torch

    return open_source(folder).dtype


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise MissingShardError(
            f"{file} does not exist; give a model directory, its config.json, a GGUF file or a store"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}; check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); give a model's config.json") from error
    if not isinstance(found, dict) or not ("model_type" in found or "config" in found):
        raise CheckpointError(
            f"{file} is not a model's configuration, because it has no model_type; give its config.json"
        )
    return found


def model_of(
    name: str,
    fields: dict[str, Any],
    dtype: str | None,
    context: int,
    experts: str | None = None,
    aligned: bool = False,
    native_bits: float = 0.0,
    dense: str | None = None,
) -> ModelSize:
    """Without torch if the configuration alone gives the sizes. `experts`: how a store keeps those of a quantised
    model, or to what it quantises them; None for native. `aligned`: there is a shadow, whose KV rows are aligned.
    `native_bits`: see `Described`.
    `dense`: how a new store keeps the dense part; None for plain.

    Raises CheckpointError, NotMoEError, UnsupportedFamilyError or ConfigError.
    """
    label = Path(name).name.removesuffix(".json") or name
    plain = without_quantisation(fields)
    if quantisation_settings(fields) and dtype is None and not names_dtype(fields):
        dtype = "bfloat16"  # as published models are computed
    known = configured_size(plain, dtype, context, label)
    found = known or _count_sizes(plain, dtype, context, label, aligned)
    if dense is not None:
        found = with_encoded_dense(found, plain, dense, known is not None)
    if quantisation := Quantisation.of(experts):
        _check_plain(label, fields, native_bits, quantisation)
        quantised = with_quantised_experts(found, quantisation)
        if known is None or not quantised.native_bits or plain.get("model_type") in _TRANSPOSED:
            _check_layout(plain, quantisation)
        return quantised
    return found if experts == "dequantised" else with_native_experts(found, fields, native_bits)


def _check_plain(label: str, fields: dict[str, Any], native_bits: float, quantisation: Quantisation) -> None:
    """Raises UnsupportedFormatError for experts in few bits, which `odmoe shard --experts int4` refuses."""
    settings = quantisation_settings(fields)
    method = str(settings.get("quant_method", "")) if isinstance(settings, dict) else ""
    if native_bits or (method and method not in QUANTISABLE) or expert_dtype(fields) not in (None, "fp8"):
        from checkpoint.sharding.quantised_experts import quantised_already  # torch

        raise quantised_already(Path(label), method or "GGUF", quantisation)


def _check_layout(plain: dict[str, Any], quantisation: Quantisation) -> None:
    """Raises UnsupportedFormatError for weights whose rows it cannot quantise."""
    import torch

    from checkpoint import family
    from checkpoint.sharding.quantised_experts import check_layout

    config = family.config_from_dict(plain)
    for name, module in family.experts_modules(family.meta_model(config, torch.bfloat16)).values():
        check_layout(module, family.expert_parameters(name, module), config.model_type, quantisation)


def _count_sizes(fields: dict[str, Any], dtype: str | None, context: int, label: str, aligned: bool) -> ModelSize:
    from checkpoint import kv
    from checkpoint.family import config_from_dict, parse_dtype, stored_dtype
    from checkpoint.sizes.model_size import count

    config = config_from_dict(fields)
    found = count(config, parse_dtype(dtype) if dtype else stored_dtype(config), context, label)
    if aligned:
        kv.kinds(config)
    return found

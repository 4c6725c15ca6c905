"""The published format of a checkpoint, by its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoint.formats.awq import Awq
from checkpoint.formats.base import PublishedFormat
from checkpoint.formats.bitsandbytes import BitsAndBytes
from checkpoint.formats.block_fp8 import BlockFp8
from checkpoint.formats.compressed_tensors import CompressedTensors
from checkpoint.formats.gptq import Gptq
from checkpoint.formats.mxfp4 import Mxfp4
from checkpoint.formats.settings import MODELOPT, quantisation_method, quantisation_settings
from scheduler.errors import UnsupportedFormatError

FORMATS: dict[str, type[PublishedFormat]] = {
    "mxfp4": Mxfp4,
    "fp8": BlockFp8,
    "mxfp8": BlockFp8,
    "compressed-tensors": CompressedTensors,
    "awq": Awq,
    "gptq": Gptq,
    "bitsandbytes": BitsAndBytes,
}
"""By `quant_method`."""


def published_format(config: dict[str, Any], path: Path) -> PublishedFormat | None:
    """The format of the checkpoint at `path` with this config.json; None for plain float tensors.

    Raises UnsupportedFormatError.
    """
    settings = quantisation_settings(config)
    if not settings:
        _check_modelopt(path)
        return None
    method = quantisation_method(settings) if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or not isinstance(method, str) or method not in FORMATS:
        raise UnsupportedFormatError(
            f"{path} is quantised ({method}), which cannot be read; these can: {', '.join(FORMATS)}. Give a "
            "checkpoint in one of them or in bfloat16, or make one: load it in Transformers with dequantize=True, and "
            "save it with save_pretrained(..., save_original_format=False)"
        )
    return FORMATS[method](method, settings, path)


def check_format(config: dict[str, Any], path: Path) -> None:
    """Raises UnsupportedFormatError for a checkpoint at `path` whose config.json already says that it cannot be read.
    For `odmoe plan` as for `odmoe shard`: no weights are needed."""
    found = published_format(config, path)
    if found is not None:
        found.quantizer(None)


def _check_modelopt(path: Path) -> None:
    """Raises UnsupportedFormatError for a checkpoint of NVIDIA ModelOpt, whose format is not in config.json."""
    file = path / MODELOPT
    if not file.is_file():
        return
    try:
        settings = json.loads(file.read_bytes())["quantization"]
        kind = settings["quant_algo"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        kind = "unknown"
    if kind:  # none where only the KV cache is quantised
        raise UnsupportedFormatError(
            f"{path} is quantised by NVIDIA ModelOpt ({kind}), as {MODELOPT} says, which cannot be read; these can: "
            f"{', '.join(FORMATS)}. Give a checkpoint in one of them or in bfloat16"
        )

"""Where config.json says how a checkpoint is quantised, and in which dtype it is computed. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEY = "quantization_config"
MODELOPT = "hf_quant_config.json"
"""Where NVIDIA ModelOpt says how a checkpoint is quantised."""
DTYPE_KEYS = ("dtype", "torch_dtype")
_BLOCK_SIDES = 2


def quantisation_settings(config: Mapping[str, Any]) -> Any:
    """config.json's `quantization_config`, or that of its language model; None if it has none."""
    text = config.get("text_config")
    inner = text.get(KEY) if isinstance(text, dict) else None
    return config.get(KEY) or inner


def quantisation_method(settings: Mapping[str, Any]) -> Any:
    """The `quant_method`. Checkpoints of early bitsandbytes have none, and Transformers knows them by their bits."""
    bits = settings.get("load_in_4bit") or settings.get("load_in_8bit")
    return settings.get("quant_method") or ("bitsandbytes" if bits else None)


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the dequantised model."""
    found = {key: value for key, value in config.items() if key != KEY}
    if isinstance(text := found.get("text_config"), dict):
        found["text_config"] = {key: value for key, value in text.items() if key != KEY}
    return found


def names_dtype(config: Mapping[str, Any]) -> bool:
    """Whether config.json, or its language model's part of it, says what the weights' dtype is."""
    return dtype_of(config) is not None


def dtype_of(config: Mapping[str, Any]) -> Any:
    """What config.json, or its language model's part of it, says that the weights' dtype is; None where it does not."""
    parts = [config, config.get("text_config")]
    return next((part[key] for part in parts if isinstance(part, dict) for key in DTYPE_KEYS if part.get(key)), None)


def is_surely_readable(config: Mapping[str, Any], path: Path) -> bool:
    """Whether `checkpoint.formats.published.check_format` would find nothing, as far as that is known without torch:
    for plain weights, and for the settings with which gpt-oss and DeepSeek-V3 are published. `path`: the directory."""
    settings = quantisation_settings(config)
    if not settings:
        return not (path / MODELOPT).is_file()
    if not isinstance(settings, dict):
        return False
    skipped = settings.get("modules_to_not_convert") or []
    if type(skipped) is not list or any(type(name) is not str for name in skipped):
        return False
    others = {key: value for key, value in settings.items() if key not in ("quant_method", "modules_to_not_convert")}
    match settings.get("quant_method"):
        case "mxfp4":
            return not others
        case "fp8":
            block = others.pop("weight_block_size", None)
            square = type(block) is list and len(block) == _BLOCK_SIDES and all(type(n) is int and n > 0 for n in block)
            return square and others.items() <= {"activation_scheme": "dynamic", "fmt": "e4m3"}.items()
    return False

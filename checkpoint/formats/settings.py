"""Where config.json says how a checkpoint is quantised. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "quantization_config"


def quantisation_settings(config: Mapping[str, Any]) -> Any:
    """config.json's `quantization_config`, or that of its language model; None if it has none."""
    text = config.get("text_config")
    inner = text.get(KEY) if isinstance(text, dict) else None
    return config.get(KEY) or inner


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the dequantised model."""
    found = {key: value for key, value in config.items() if key != KEY}
    if isinstance(text := found.get("text_config"), dict):
        found["text_config"] = {key: value for key, value in text.items() if key != KEY}
    return found

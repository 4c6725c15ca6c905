"""A checkpoint that is to be sharded, and what reads its quantised weights."""

from __future__ import annotations

from typing import Any

from checkpoint.formats.base import PublishedFormat
from checkpoint.sharding.source import Source


class Plan:
    """`model`: without its bytes; its dtype is that of the dequantised weights. `format`: None for plain floats."""

    def __init__(self, source: Source, model: Any, format: PublishedFormat | None) -> None:
        self.source = source
        self.model = model
        self.format = format
        self.quantizer: Any = None
        """Transformers' (HfQuantizer), of a checkpoint that has a format."""
        self.words: dict[str, str] = {}
        """Of the quantised tensors, by name: what the format calls such a part of a weight."""

"""What a main node is made with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint.kernels import EXACT, Linear
from main_node.choosing.guide import Guides
from main_node.drafting import DraftSource

Stopper = Callable[[tuple[str, ...], list[int]], Callable[[int], bool]]
"""(stop texts, prompt) -> a function that takes an answer's tokens in order and is True once it has reached one of
them."""


@dataclass(frozen=True, slots=True)
class Computing:
    """How the model is computed."""

    dtype: torch.dtype
    device: torch.device | str = "cpu"
    """Of the model, its KV caches and its logits."""
    linear: Linear = EXACT
    """Multiplies single rows in the model's linear layers."""


@dataclass(frozen=True, slots=True)
class TextRules:
    """What a tokenizer is needed for. None: without."""

    stopper: Stopper | None = None
    """Finds stop texts."""
    guides: Guides | None = None
    """Make answers follow schemas."""
    end_token: int | None = None
    """The tokenizer's end of a text."""


@dataclass(frozen=True, slots=True)
class PredictionSources:
    """Where drafts and predictions come from, beside the shadow and the scheduler's own."""

    drafts: DraftSource | None = None
    """Of the next tokens; None: there are none."""
    token_file: Path | None = None
    """Weights of the token-wise predictor, if the scheduler has one."""
    learning_rate: float = 0.0
    """Of the token-wise predictor; 0: it does not learn."""

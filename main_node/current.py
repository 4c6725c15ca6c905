"""The pass that runs on the model's thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from main_node.choosing.prompt_scores import PromptScores
from scheduler import types as t


@dataclass(slots=True)
class Current:
    """The pass that runs on the model's thread just now."""

    visit: t.Visit
    cache: Any
    in_block: bool
    scores: PromptScores | None
    whole: int = 0
    """Tokens of which it reads a chunk, with those before; 0: it reads no chunk."""
    states: list[torch.Tensor] = field(default_factory=list)
    """The model's last hidden states, [1, T, H] together, if a head drafts from them."""

"""What the text of an answer may be: a guide says before each token which ones may be next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Guide(Protocol):
    """Of one answer."""

    def allowed_tokens(self) -> torch.Tensor:
        """The tokens that may be next: bool [V], on the host. Raises RequestFailedError."""

    def take(self, token: int) -> None:
        """The answer goes on with this token, which is allowed. Raises RequestFailedError."""

    @property
    def complete(self) -> bool:
        """The text is complete, and no more may follow."""


Guides = Callable[[str, frozenset[int], int], Guide]
"""(JSON schema, end-of-sequence tokens, tokens of the vocabulary) -> the guide of an answer that follows the schema.
Raises ConfigError."""

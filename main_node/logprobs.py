"""Log-probabilities of tokens, as they reach the client."""

from __future__ import annotations

from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """Of one token of the prompt or the answer: natural logarithms of the model's own probabilities (the softmax of its
    float32 logits), before temperature, penalties, biases and a schema."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the most probable tokens at this place, the most probable first."""

"""Log-probabilities of tokens, as they reach the client."""

from __future__ import annotations

from typing import NamedTuple

import torch

from checkpoint.devices.transfer import to_host


class TokenLogprobs(NamedTuple):
    """Of one token of the prompt or the answer: natural logarithms of the model's own probabilities (the softmax of its
    float32 logits), before temperature, penalties, biases and a schema."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the most probable tokens at this place, the most probable first."""


class Logprobs(NamedTuple):
    """Of T places, on one device."""

    own: torch.Tensor
    """Of the tokens at these places: [T], float32."""
    best: torch.Tensor
    """Of the n most probable: [T, n], float32."""
    ids: torch.Tensor
    """These tokens: [T, n]."""

    def of_tokens(self, tokens: list[int]) -> list[TokenLogprobs]:
        """For the client. `tokens`: those at these places. Waits for the device."""
        own, best, ids = (tensor.tolist() for tensor in to_host(*self))
        return [
            TokenLogprobs(token, one, tuple(zip(others, values, strict=True)))
            for token, one, values, others in zip(tokens, own, best, ids, strict=True)
        ]


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> Logprobs:
    """From logits [T, V], float32, and the tokens [T] at these places; `top`: how many of the most probable."""
    every = logits.log_softmax(-1)
    best, ids = every.topk(top, -1)
    return Logprobs(every.gather(1, tokens[:, None])[:, 0], best, ids)

"""A text in passages of tokens, and how well logits foresee them."""

from __future__ import annotations

import math

import torch


def windows(ids: list[int], length: int) -> list[list[int]]:
    """Pieces of at most `length` tokens. Each begins with the last token of the one before, which it is not asked
    about: so every token but the first is asked about once."""
    return [ids[start : start + length] for start in range(0, len(ids) - 1, length - 1)]


def losses(logits: torch.Tensor, window: list[int]) -> list[float]:
    """Nats of each token but the first; `logits` [T or T - 1, V], row n saying what follows token n."""
    chosen = torch.tensor(window[1:])
    scores = torch.log_softmax(logits[: len(chosen)].double(), dim=-1)
    return [-float(row[token]) for row, token in zip(scores, chosen.tolist(), strict=True)]


def perplexity(nats: list[float]) -> float:
    return math.exp(sum(nats) / len(nats))


def divergence(logits: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats [T], float64: p of `logits` [T, V], q of `other`."""
    p, q = (torch.log_softmax(one.double(), dim=-1) for one in (logits, other))
    return (p.exp() * (p - q)).sum(dim=-1)

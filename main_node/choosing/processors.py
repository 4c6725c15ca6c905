"""Logits processors beside Transformers' own: OpenAI's penalties and biases, and a guide."""

from __future__ import annotations

import math

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from checkpoint.devices.transfer import to_device
from main_node.choosing.guide import Guide
from main_node.sampling import Sampling
from scheduler.errors import ConfigError

_FLOAT32_MAX = torch.finfo(torch.float32).max


class Penalties(LogitsProcessor):  # type: ignore[misc]
    """Lowers the logit of a token that the answer has `count` times by `count * frequency + presence`."""

    def __init__(self, presence: float, frequency: float, prompt: int) -> None:
        """`prompt`: its tokens, which are not counted."""
        self._presence, self._frequency = presence, frequency
        self._prompt = prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        answer = input_ids[:, self._prompt :]
        ones = torch.ones(answer.shape, dtype=scores.dtype, device=scores.device)
        counts = torch.zeros_like(scores).scatter_add(1, answer, ones)
        return scores - counts * self._frequency - (counts > 0) * self._presence


class Biases(LogitsProcessor):  # type: ignore[misc]
    """Adds a number to the logit of each of some tokens."""

    def __init__(self, biases: tuple[tuple[int, float], ...], vocabulary: int, device: torch.device) -> None:
        bias = torch.zeros(1, vocabulary)
        for token, value in biases:
            bias[0, token] += value
        (self._bias,) = to_device(device, bias)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self._bias


class Guided(LogitsProcessor):  # type: ignore[misc]
    """Leaves the tokens that a guide allows."""

    def __init__(self, guide: Guide, device: torch.device) -> None:
        self._guide = guide
        self._device = device

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        (allowed,) = to_device(self._device, self._guide.allowed_tokens())
        return scores.masked_fill(~allowed, -math.inf)


def processors_of(
    sampling: Sampling, prompt: int, guide: Guide | None, vocabulary: int, device: torch.device
) -> LogitsProcessorList:
    """Of one answer, in their order. `prompt`, `vocabulary`: numbers of tokens. Raises ConfigError for a number that is
    none and for a token that the model does not have."""
    _check(sampling, vocabulary)
    found = LogitsProcessorList()
    if sampling.presence_penalty or sampling.frequency_penalty:
        found.append(Penalties(sampling.presence_penalty, sampling.frequency_penalty, prompt))
    if sampling.logit_bias:
        found.append(Biases(sampling.logit_bias, vocabulary, device))
    if guide is not None:
        found.append(Guided(guide, device))
    return found


def _check(sampling: Sampling, vocabulary: int) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        if not abs(value) <= _FLOAT32_MAX:
            raise ConfigError(f"{name} is {value}; give a finite number")
    for token, value in sampling.logit_bias:
        if not 0 <= token < vocabulary:
            raise ConfigError(
                f"logit_bias names token {token}; allowed: 0 to {vocabulary - 1}, the model has {vocabulary} tokens"
            )
        if not abs(value) <= _FLOAT32_MAX:
            raise ConfigError(f"logit_bias adds {value} to token {token}; give a finite number")

"""Training of a token-wise predictor: a matrix of the gate's shape for each MoE layer (SMOE, section IV-D).

From the gate input of each decoded token and the gate's choice at the next one, each layer learns by itself:
cross-entropy against the next top-k, in proportion to their scores. Recall is the share of the next top-k that is among
the predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from checkpoint.prediction.token_predictor import targets
from odmoe.training.observed_model import ObservedModel, Rows, hits
from scheduler.errors import PromptError

RATE, DECAY = 0.02, 1.0
TOGETHER = 50
"""Prompts answered in the same passes."""
Progress = Callable[[str, int, int], None]
Weights = Mapping[int, torch.Tensor]
"""Layer -> [E, H]."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Of one layer, a row a decoded token."""

    inputs: torch.Tensor
    """[N, H]: its gate input."""
    following: torch.Tensor
    """[N, E]: scores of the next token's gate."""
    chosen: torch.Tensor
    """[N, k]: the choice of the next token's gate."""
    own: torch.Tensor
    """[N, E]: this token's scores."""


@dataclass(frozen=True, slots=True)
class Recall:
    """On held-out answers, of one layer, or the mean of several."""

    before: float | None
    """Of the predictor that the file held before; None where there was none."""
    after: float
    same: float
    """Of predicting this token's own experts again."""
    chance: float


def collect(
    observed: ObservedModel, prompts: list[list[int]], tokens: int, progress: Progress
) -> list[dict[int, Samples]]:
    """Of each prompt's greedy answer: layer -> samples. Empty where an answer has fewer than two decoded tokens."""
    found: list[dict[int, Samples]] = [{} for _ in prompts]
    by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))  # less padding
    groups = [by_length[first : first + TOGETHER] for first in range(0, len(prompts), TOGETHER)]
    for done, group in enumerate(groups):

        def on_pass(number: int, done: int = done) -> None:
            progress("answering", done * (tokens + 1) + number, len(groups) * (tokens + 1))

        rows = observed.answers([prompts[number] for number in group], tokens, on_pass)
        for number, one in zip(group, rows, strict=True):
            found[number] = _samples(one)
    return found


def _samples(rows: Rows) -> dict[int, Samples]:
    """Each decoded token but the last, and the token after it."""
    first = rows.prompt
    return {
        layer: Samples(inputs[first:-1], rows.scores[layer][first + 1 :], rows.index[layer][first + 1 :], own[first:-1])
        for (layer, inputs), own in zip(rows.inputs.items(), rows.scores.values(), strict=True)
        if len(inputs) > first + 1
    }


def join_samples(samples: list[dict[int, Samples]]) -> dict[int, Samples]:
    """Samples of several answers as those of one. Raises PromptError where there are none at all."""
    parts = [one for one in samples if one]
    if not parts:
        raise PromptError("the model ends its answers at once: no two decoded tokens to learn from; give other prompts")
    names = ("inputs", "following", "chosen", "own")
    return {
        layer: Samples(*(torch.cat([getattr(one[layer], name) for one in parts]) for name in names))
        for layer in parts[0]
    }


def fit(samples: Samples, top_k: int, steps: int) -> torch.Tensor:
    """[E, H]: the weights of least cross-entropy against the next gate's choice. They start as zeros: no seed."""
    weight = torch.zeros(samples.following.shape[1], samples.inputs.shape[1], requires_grad=True)
    wanted = targets(samples.following, top_k).clone()
    inputs = samples.inputs.clone()  # out of inference mode
    optimiser = torch.optim.AdamW([weight], lr=RATE / inputs.square().mean().sqrt().item(), weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(inputs @ weight.T, wanted).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    return weight.detach()


def measure(weights: Weights, before: Weights | None, unseen: Mapping[int, Samples]) -> dict[int, Recall]:
    """Recall by layer on samples that were not learned from. `before`: weights to compare with."""
    found = {}
    for layer, samples in unseen.items():

        def recall(scores: torch.Tensor, chosen: torch.Tensor = samples.chosen) -> float:
            return round(hits(scores, chosen) / chosen.numel(), 4)

        found[layer] = Recall(
            before=None if before is None else recall(samples.inputs @ before[layer].T),
            after=recall(samples.inputs @ weights[layer].T),
            same=recall(samples.own),
            chance=round(samples.chosen.shape[1] / samples.own.shape[1], 4),
        )
    return found


def mean_of(recalls: Mapping[int, Recall]) -> Recall:
    """Over layers."""

    def mean(values: list[float]) -> float:
        return round(sum(values) / len(values), 4)

    each = list(recalls.values())
    before = [one.before for one in each if one.before is not None]
    return Recall(
        mean(before) if before else None,
        mean([one.after for one in each]),
        mean([one.same for one in each]),
        mean([one.chance for one in each]),
    )

"""Training of a token-wise predictor: a matrix of the gate's shape for each MoE layer (SMOE, section IV-D).

From the gate input of each decoded token and the gate's choice at the next one, each layer learns by itself:
cross-entropy against the next top-k, in proportion to their scores. Recall is the share of the next top-k that is among
the predicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from checkpoint.prediction.token_predictor import targets
from odmoe.training.observed_model import ObservedModel, hits
from scheduler.errors import PromptError

RATE, DECAY = 0.02, 1.0
Progress = Callable[[str, int, int], None]


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
    """Of one layer, on the held-out answers."""

    layer: int
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
    found = []
    for number, prompt in enumerate(prompts):
        decoded = []
        for one in observed.answer(prompt, tokens):
            if one.tokens == 1:
                decoded.append(one)
                progress("answering", number * tokens + len(decoded), len(prompts) * tokens)
        pairs = list(itertools.pairwise(decoded))
        layers = observed.shape.layers if pairs else ()
        found.append(
            {
                layer: Samples(
                    torch.cat([now.inputs[layer] for now, _ in pairs]),
                    torch.cat([then.scores[layer] for _, then in pairs]),
                    torch.cat([then.index[layer] for _, then in pairs]),
                    torch.cat([now.scores[layer] for now, _ in pairs]),
                )
                for layer in layers
            }
        )
        progress("answering", (number + 1) * tokens, len(prompts) * tokens)
    return found


def joined(samples: list[dict[int, Samples]]) -> dict[int, Samples]:
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


def measure(
    weights: dict[int, torch.Tensor], before: dict[int, torch.Tensor] | None, unseen: dict[int, Samples]
) -> list[Recall]:
    """Recall on samples that were not learned from, by layer."""
    found = []
    for layer, samples in unseen.items():

        def recall(scores: torch.Tensor, chosen: torch.Tensor = samples.chosen) -> float:
            return round(hits(scores, chosen) / chosen.numel(), 4)

        found.append(
            Recall(
                layer=layer,
                before=None if before is None else recall(samples.inputs @ before[layer].T),
                after=recall(samples.inputs @ weights[layer].T),
                same=recall(samples.own),
                chance=round(samples.chosen.shape[1] / samples.own.shape[1], 4),
            )
        )
    return found

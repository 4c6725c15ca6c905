"""The file of a token-wise predictor: one matrix of the gate's shape a MoE layer (SMOE, section IV-D)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from checkpoint.gates import Gates
from scheduler.errors import CheckpointError, CorruptCheckpointError, MissingShardError

FILE = "token_predictor.safetensors"
"""Its name in a model's directory."""
_KEY = "layers.{}.weight"


@dataclass(frozen=True)
class TokenPredictor:
    """Predicts the next token's experts from a token's gate input."""

    weights: dict[int, torch.Tensor]
    """Layer -> [E, H], float32; times a gate input they give the logits of the next token's experts."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts of the training, as JSON."""

    @property
    def nbytes(self) -> int:
        """All weights."""
        return sum(weight.nbytes for weight in self.weights.values())

    def scores(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Scores [T, E], each row of sum 1, for gate inputs [T, H]."""
        return (hidden.float() @ self.weights[layer].T).softmax(-1)

    def learn(self, layer: int, hidden: torch.Tensor, target: torch.Tensor, rate: float) -> None:
        """One gradient step on the cross-entropy against `target` [T, E] (each row of sum 1) for gate inputs [T, H].
        The step is scaled by the size of the inputs, so that `rate` does not depend on it."""
        rows = hidden.float()
        slope = self.scores(layer, rows) - target
        size = rows.square().sum(-1, keepdim=True).clamp_min(1e-12)
        self.weights[layer].sub_(rate * slope.T @ (rows / size) / len(rows))


def targets(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Training targets [T, E]: scores of the experts that the gate chose, each row of sum 1; 0 for the others."""
    top = scores.topk(min(top_k, scores.shape[-1]), -1)
    kept = torch.zeros_like(scores).scatter_(-1, top.indices, top.values)
    return kept / kept.sum(-1, keepdim=True)


def save(predictor: TokenPredictor, gates: Gates, path: Path) -> None:
    """Write a predictor, whole or not at all, bound to a model with these gates. Raises OSError."""
    from safetensors.torch import save as packed

    metadata = {"gates": gates.digest(), "facts": json.dumps(predictor.facts)}
    partial = path.with_name(f".{path.name}.partial")
    data = packed({_KEY.format(n): value.contiguous() for n, value in predictor.weights.items()}, metadata)
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:  # that of a full disk has no name
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path, gates: Gates, device: torch.device | str = "cpu") -> TokenPredictor:
    """Raises MissingShardError, CorruptCheckpointError, or CheckpointError for a predictor of another model."""
    from safetensors import SafetensorError, safe_open

    advice = "train it: odmoe train-predictor MODEL"
    if not path.is_file():
        raise MissingShardError(f"the token-wise predictor {path} is not there; {advice}")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no dictionary
        facts = json.loads(metadata.get("facts", "{}"))
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptCheckpointError(f"{path} is no whole safetensors file ({error}); {advice}") from error
    lost = [layer for layer in gates.layers if _KEY.format(layer) not in found]
    if metadata.get("gates") != gates.digest() or lost:
        raise CheckpointError(f"{path} was trained for another model than this one; {advice}")
    return TokenPredictor({layer: found[_KEY.format(layer)].to(device, torch.float32) for layer in gates.layers}, facts)

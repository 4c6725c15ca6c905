"""A model's gates: their last scores, their scores of another input, and the routing weights of another choice."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from checkpoint import family
from checkpoint.gate_search import SCORE_FUNCTIONS, GateSpec, Rule, find_gate

GateOutput = dict[int, Any]
"""Layer -> its gate's output."""


class Gates:
    """The gates of a model's MoE layers; T rows, H hidden elements, E experts, k of them chosen a row.

    Hooks keep each gate's last output; the model computes as before. Raises UnsupportedFamilyError for a model whose
    routing weights are neither proportional to its scores nor those normalised (PhiMoE), or whose gate cannot be
    computed by itself.
    """

    def __init__(self, model: Any) -> None:
        self._modules: dict[int, torch.nn.Module] = {}
        self._forwards: dict[int, Callable[..., Any]] = {}
        self._gates: dict[int, GateSpec] = {}
        self._last: GateOutput = {}
        self._into = self._last  # where hooks put outputs
        known: dict[tuple[type, int], GateSpec] = {}
        for layer, (name, experts) in family.experts_modules(model).items():
            block = model.get_submodule(name.rpartition(".")[0])
            kind = (type(block), family.expert_count(experts))
            if kind not in known:
                known[kind] = find_gate(model, block, experts, name)
            self._add(layer, block, known[kind])

    def _add(self, layer: int, block: torch.nn.Module, gate: GateSpec) -> None:
        module = block.get_submodule(gate.path)
        self._modules[layer], self._forwards[layer] = module, module.forward
        self._gates[layer] = gate.bound_to(block)

        def keep(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            self._into[layer] = output

        module.register_forward_hook(keep)

    @property
    def layers(self) -> tuple[int, ...]:
        """The MoE layers, ascending."""
        return tuple(self._gates)

    def module(self, layer: int) -> torch.nn.Module:
        """The gate's module."""
        return self._modules[layer]

    def rule(self, layer: int) -> Rule:
        """How this layer's scores become weights."""
        return self._gates[layer].rule

    def scores(self, layer: int) -> torch.Tensor:
        """[T, E], float32, of the last call. In each row the routing weights are proportional to these."""
        return self._scores(layer, self._last[layer])

    def ranked_scores(self, layer: int, outputs: GateOutput | None = None) -> torch.Tensor:
        """As `scores`, but the k highest of a row are the experts that the gate chose. `outputs`: those of `aside`.

        Where a gate chooses by more than its scores (DeepSeek's groups and correction), the chosen experts are raised
        above the others by the highest score.
        """
        return self._raise_chosen(layer, (self._last if outputs is None else outputs)[layer])

    def use(self, outputs: GateOutput) -> None:
        """Keep gates' outputs here from now on: passes that take turns layer by layer have one dictionary each."""
        self._last = self._into = outputs

    def forget(self, layer: int) -> None:
        """Drop the gate's last output: for a long prompt it has megabytes."""
        self._last.pop(layer, None)

    def scores_of(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Scores [T, E] of any gate inputs [T, H]. `scores` stays as it is."""
        return self._scores(layer, self._output(layer, hidden))

    def ranked_at(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """As `scores_of`, with the chosen experts raised as in `ranked_scores`."""
        return self._raise_chosen(layer, self._output(layer, hidden))

    def _output(self, layer: int, hidden: torch.Tensor) -> Any:
        gate = self._gates[layer]
        return self._forwards[layer](hidden, *gate.extra, **gate.keywords)

    def _scores(self, layer: int, output: Any) -> torch.Tensor:
        gate = self._gates[layer]
        logits = output[gate.logits_place]
        return SCORE_FUNCTIONS[gate.rule.score_function](logits.reshape(-1, logits.shape[-1]).float())

    def _raise_chosen(self, layer: int, output: Any) -> torch.Tensor:
        scores, gate = self._scores(layer, output), self._gates[layer]
        if gate.rule.plain:
            return scores
        index = output[gate.index_place].reshape(len(scores), -1).long()
        top = scores.topk(index.shape[1]).indices
        differs = (top.sort(1).values != index.sort(1).values).any(1, keepdim=True)
        return scores.scatter_add(1, index, (scores.amax(1, keepdim=True) * differs).expand_as(index))

    @contextlib.contextmanager
    def aside(self) -> Iterator[GateOutput]:
        """Meanwhile gates' outputs go here, and not to `scores`."""
        before, self._into = self._into, {}
        try:
            yield self._into
        finally:
            self._into = before

    def reweigh(
        self,
        layer: int,
        index: torch.Tensor,
        weights: torch.Tensor,
        chosen: Sequence[Sequence[int]],
        scores: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(index, weights), each [T, most chosen], for the experts `chosen` for each row in place of the gate's own.

        `index`, `weights` [T, k] and `scores` [T, E]: of one call of the gate; without `scores`, of its last call. A
        row with the gate's own experts keeps both bit for bit. Rows with fewer experts than others repeat their last
        one, with weight 0.
        """
        if all(set(new) == set(old) for new, old in zip(chosen, index.tolist(), strict=True)):
            return index, weights
        scores = (self.scores(layer) if scores is None else scores).to(weights.device)
        rule = self._gates[layer].rule
        width = max(map(len, chosen))
        padded = [list(row) + [row[-1]] * (width - len(row)) for row in chosen]
        real = torch.tensor([[n < len(row) for n in range(width)] for row in chosen], device=weights.device)
        new_index = torch.tensor(padded, dtype=index.dtype, device=index.device)
        raw = scores.gather(1, new_index.long()) * real
        if rule.normalised:
            raw = raw / raw.sum(1, keepdim=True)
        new = (raw * rule.scale).to(weights.dtype)
        if not rule.normalised:
            new = _with_own_weights(new_index, new, index, weights, real)
        for row, (experts, own) in enumerate(zip(chosen, index.tolist(), strict=True)):
            if set(experts) == set(own) and len(own) == width:
                new_index[row], new[row] = index[row], weights[row]
        return new_index, new

    def digest(self) -> str:
        """Of all gates' parameters in bfloat16: independent of the dtype in which the model was loaded."""
        sums = hashlib.sha256()
        for module in self._modules.values():
            for _, value in sorted(module.named_parameters()):
                sums.update(value.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
        return sums.hexdigest()[:32]


def _with_own_weights(
    new_index: torch.Tensor, new: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, real: torch.Tensor
) -> torch.Tensor:
    """`new`, but with the gate's own weight where it chose the expert too. For weights that are not normalised."""
    same = (new_index[:, :, None] == index[:, None, :]) & real[:, :, None]
    own = torch.where(same, weights[:, None, :], 0).sum(-1)
    return torch.where(same.any(-1), own, new)

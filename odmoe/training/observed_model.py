"""What a checkpoint's gates see and choose while Transformers itself answers a prompt, pass by pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from checkpoint import family
from checkpoint.gates import Gates


@dataclass
class Pass:
    """One forward pass over T tokens from `position` on. By MoE layer:"""

    position: int
    tokens: int
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """[T, H]: the input of experts and gate."""
    index: dict[int, torch.Tensor] = field(default_factory=dict)
    """[T, k]: the gate's choice."""
    scores: dict[int, torch.Tensor] = field(default_factory=dict)
    """[T, E], as Gates.ranked."""
    before: dict[int, torch.Tensor] = field(default_factory=dict)
    """[T, H]: the input of the layer's attention, where attentions are observed."""


class ObservedModel:
    """Hooks on the gates of Transformers' model, and with `attentions` on the attentions of its MoE layers.

    Raises UnsupportedFamilyError for a model whose gates cannot be told, as Gates does.
    """

    def __init__(self, model: Any, attentions: bool = False) -> None:
        self.model = model
        self.gates = Gates(model)
        modules = family.experts_modules(model)
        counts = tuple(family.expert_count(module) for _, module in modules.values())
        self.shape = family.shape_of(model.config, tuple(modules), max(counts), counts)
        self.cache: Any = None
        self.watching = True
        """False while hooks shall not heed what runs."""
        self.experts = {layer: module for layer, (_, module) in modules.items()}
        self._pass = Pass(0, 0)
        for layer, (name, module) in modules.items():
            module.register_forward_pre_hook(self._experts_hook(layer))
            if attentions:
                block = model.get_submodule(".".join(name.split(".")[: name.split(".").index(str(layer)) + 1]))
                block.self_attn.register_forward_pre_hook(self._attention_hook(layer), with_kwargs=True)

    def _experts_hook(self, layer: int) -> Any:
        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if self.watching:
                now = self._pass
                now.inputs[layer], now.index[layer] = args[0], args[1]
                now.scores[layer] = self.gates.ranked(layer)

        return hook

    def _attention_hook(self, layer: int) -> Any:
        def hook(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.watching:
                hidden = args[0] if args else kwargs["hidden_states"]
                self._pass.before[layer] = hidden[0]

        return hook

    def answer(self, prompt: list[int], tokens: int) -> Iterator[Pass]:
        """The passes of the greedy answer: prefill, then at most `tokens` decode passes. End of sequence ends it."""
        self.cache, feed, position = family.new_cache(self.model.config), prompt, 0
        end = self.model.generation_config.eos_token_id
        ends = set() if end is None else set(torch.tensor(end).reshape(-1).tolist())
        with torch.inference_mode():
            for _ in range(tokens + 1):
                self._pass = Pass(position, len(feed))
                out = self.model(
                    input_ids=torch.tensor([feed]), past_key_values=self.cache, use_cache=True, logits_to_keep=1
                )
                yield self._pass
                position += len(feed)
                feed = [int(out.logits[0, -1].argmax())]
                if feed[0] in ends:
                    return


def hits(scores: torch.Tensor, index: torch.Tensor) -> int:
    """How many of the experts chosen [T, k] are among the k highest of these scores [T, E], row by row."""
    top = scores.topk(index.shape[1], -1).indices
    return int((top[:, :, None] == index[:, None, :]).any(1).sum())

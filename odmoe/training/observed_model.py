"""What a checkpoint's gates see and choose while Transformers itself answers a prompt, pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    """[T, E], as Gates.ranked_scores."""
    before: dict[int, torch.Tensor] = field(default_factory=dict)
    """[T, H]: the input of the layer's attention, where attentions are observed."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One prompt's rows and those of its answer's decode passes, N in all. By MoE layer, as in Pass:"""

    prompt: int
    """How many are the prompt's."""
    inputs: dict[int, torch.Tensor]
    index: dict[int, torch.Tensor]
    scores: dict[int, torch.Tensor]


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
                now.scores[layer] = self.gates.ranked_scores(layer)

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
        ends = self._ends()
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

    def answers(self, prompts: list[list[int]], tokens: int, progress: Callable[[int], None]) -> list[Rows]:
        """As `answer`, of several prompts in the same passes, shorter ones padded on the left: many times as fast.
        `progress` is called with the number of passes done."""
        longest, ends = max(map(len, prompts)), torch.tensor(sorted(self._ends()))
        feed = torch.tensor([[0] * (longest - len(one)) + one for one in prompts])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
        cache, passes = family.new_cache(self.model.config), []
        going, counts = torch.ones(len(prompts), dtype=torch.bool), torch.tensor([len(one) for one in prompts])
        with torch.inference_mode():
            for number in range(tokens + 1):
                self._pass = Pass(0, feed.shape[1])
                out = self.model(
                    input_ids=feed,
                    attention_mask=mask,
                    position_ids=(mask.cumsum(-1) - 1).clamp_min(0)[:, -feed.shape[1] :],
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                passes.append(self._pass)
                progress(number)
                feed = out.logits[:, -1].argmax(-1, keepdim=True)
                going &= ~torch.isin(feed[:, 0], ends)
                if number == tokens or not going.any():
                    break
                counts += going
                mask = torch.cat([mask, torch.ones_like(feed)], 1)
            return _by_prompt(passes, [len(one) for one in prompts], counts.tolist())

    def _ends(self) -> set[int]:
        """Tokens that end a sequence."""
        end = self.model.generation_config.eos_token_id
        return set() if end is None else set(torch.tensor(end).reshape(-1).tolist())


def _by_prompt(passes: list[Pass], prompts: list[int], counts: list[int]) -> list[Rows]:
    """`prompts`: each one's length; `counts`: its rows in all. Rows of padding are left out."""
    padded = passes[0].tokens

    def whole(name: str) -> dict[int, torch.Tensor]:
        """Layer -> [B, N, ...]."""
        return {
            layer: torch.cat([getattr(one, name)[layer].unflatten(0, (len(prompts), one.tokens)) for one in passes], 1)
            for layer in passes[0].inputs
        }

    inputs, index, scores = whole("inputs"), whole("index"), whole("scores")

    def of(number: int, rows: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        first = padded - prompts[number]
        return {layer: value[number, first : first + counts[number]] for layer, value in rows.items()}

    return [Rows(length, of(n, inputs), of(n, index), of(n, scores)) for n, length in enumerate(prompts)]


def hits(scores: torch.Tensor, index: torch.Tensor) -> int:
    """How many of the experts chosen [T, k] are among the k highest of these scores [T, E], row by row."""
    top = scores.topk(index.shape[1], -1).indices
    return int((top[:, :, None] == index[:, None, :]).any(1).sum())

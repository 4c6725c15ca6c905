"""What a checkpoint's gates see and say while Transformers itself answers a prompt: one pass after another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from checkpoint import family
from checkpoint.gates import Gates
from scripts.lib.paths import ROOT

PROBLEMS = ROOT / "scripts" / "data" / "gsm8k_test.jsonl"
MEASURED = 20
"""The first so many problems are what experiments measure on: no predictor is trained on them."""


@dataclass
class Pass:
    """One forward pass over T tokens from `position` on. By MoE layer: `inputs` [T, H], what the experts and the gate
    got; `index` [T, k], what the gate chose; `scores` [T, E], as Gates.ranked; `before` [T, H], what the attention of
    that layer got."""

    position: int
    tokens: int
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    index: dict[int, torch.Tensor] = field(default_factory=dict)
    scores: dict[int, torch.Tensor] = field(default_factory=dict)
    before: dict[int, torch.Tensor] = field(default_factory=dict)


class Watched:
    """A checkpoint as Transformers loads it, in float32, on one thread, with hooks on its gates and attentions."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, experts_implementation="eager", local_files_only=True
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self.gates = Gates(self.model)
        modules = family.experts_modules(self.model)
        counts = tuple(family.expert_count(module) for _, module in modules.values())
        self.shape = family.shape_of(self.model.config, tuple(modules), max(counts), counts)
        self.cache: Any = None
        self._pass = Pass(0, 0)
        self.experts = {layer: module for layer, (_, module) in modules.items()}
        for layer, (name, module) in modules.items():
            module.register_forward_pre_hook(self._experts_hook(layer))
            block = self.model.get_submodule(".".join(name.split(".")[: name.split(".").index(str(layer)) + 1]))
            block.self_attn.register_forward_pre_hook(self._attention_hook(layer), with_kwargs=True)
        self.watching = True

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
        """The greedy answer, at most so many decode passes: prefill's pass first. It ends where the model ends it."""
        self.cache, feed, position = family.new_cache(self.model.config), prompt, 0
        ends = set(torch.tensor(self.model.generation_config.eos_token_id or -1).reshape(-1).tolist())
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

    def encode(self, text: str) -> list[int]:
        """As the model was trained to be asked."""
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids


def problems() -> list[str]:
    """GSM8K test problems as prompts."""
    lines = PROBLEMS.read_text().splitlines()
    return [f"Question: {json.loads(line)['question']}\nAnswer:" for line in lines]


def hits(scores: torch.Tensor, index: torch.Tensor) -> int:
    """How many of the experts that were chosen [T, k] are among the k highest of these scores [T, E], row by row."""
    top = scores.topk(index.shape[1], -1).indices
    return int((top[:, :, None] == index[:, None, :]).any(1).sum())

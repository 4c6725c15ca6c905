"""The nodes on which promises are tested, and what Transformers answers."""

from __future__ import annotations

from pathlib import Path

import torch

from support.faults.cluster import Seen
from support.faults.nodes import Nodes as FaultyNodes

TOKENS = 40
PROMPT = [5, 17, 80, 33, 2, 61]

BUSY_S = 1.5
"""Added to each promised time: a machine that runs tests on all cores is late."""


class Nodes(FaultyNodes):
    """`expected`: Transformers' answer to `PROMPT`."""

    def __init__(self, model: Path, store: Path, expected: list[int]) -> None:
        super().__init__(model, store)
        self.expected = expected

    def check_same(self, seen: Seen) -> None:
        assert seen.error is None, seen.error
        assert seen.tokens == self.expected
        assert seen.report.token_ids == self.expected


def greedy(model: Path, prompt: list[int], count: int) -> list[int]:
    """Transformers' own answer, `eager` experts."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(model, dtype="float32", experts_implementation="eager")
    with torch.inference_mode():
        out = whole.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=1
        )
    return [int(token) for token in out[0, len(prompt) :]]

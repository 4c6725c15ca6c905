"""The shadow's model in a process that has some of its later layers."""

from __future__ import annotations

from typing import Any

import torch

from checkpoint.devices.inference import inference
from checkpoint.devices.transfer import to_device, to_host, token_ids
from shadow_node.model import ShadowModel
from shadow_node.stages.division import RUNNING, Running


class LaterStage(ShadowModel):
    """`part.number` is above 0."""

    def run(self, tokens: list[int], hidden: torch.Tensor, cache: Any) -> torch.Tensor | int:
        """Run the layers here on hidden [1, T, ...] of these tokens. Returns what goes on [1, T, ...], or from the last
        part the greedy next token."""
        found: list[torch.Tensor] = []

        def elsewhere(layer: int, passing: torch.Tensor) -> torch.Tensor:
            if layer == self.division.stop:
                found.append(passing)
            return passing

        device = self._placed.devices[0]
        (given,) = to_device(device, hidden)
        running = RUNNING.set(Running(cache, elsewhere, given))
        try:
            with inference():
                ids = token_ids(tokens, device)
                out = self.dense(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                return found[0] if found else int(to_host(out.logits[0, -1].float().argmax())[0])
        finally:
            RUNNING.reset(running)

"""How the shadow reads a request's prompt: at once, or by blocks of which those of earlier prompts are not read again.

As on the main node, prompts are cut at blocks whether a block is found or read, so that predictions do not depend on
what is kept. Blocks are not shared with the main node's: the shadow has its own weights, and so its own rows.
"""

from __future__ import annotations

from typing import Any

import torch

from checkpoint.block_store import BlockStore
from checkpoint.generation.rotary import Rotary
from checkpoint.kv_blocks import KVBlock, why_not_kept
from checkpoint.prefix_cache import PrefixCache, PrefixReading

BLOCK = 256
"""Tokens of a block. Smaller ones make a first reading slow, as each is a pass over all weights; of larger ones, the
next turn of a chat reads more again."""


def kept_prompts(dense: Any, rotary: Rotary, device: str, most_bytes: int) -> PrefixCache | None:
    """For a shadow's own dense part on `device`. None: nothing is kept of its prompts."""
    if not most_bytes or "," in device or rotary.by_length or why_not_kept(dense.config):
        return None
    return PrefixCache(BlockStore[KVBlock](most_bytes), BLOCK, dense.config, torch.device(device), identity="")


class PromptReading:
    """One prompt, read into `cache` by one thread. `kept`: None, and it is read at once. `end` it in any case."""

    def __init__(self, prompt: list[int], cache: Any, kept: PrefixCache | None) -> None:
        self.cache = cache
        self.position = 0
        """So many tokens are in `cache`."""
        self._prompt, self._kept = prompt, kept
        self._reading: PrefixReading | None = None
        self._has_ended = False

    @property
    def is_complete(self) -> bool:
        return self.position == len(self._prompt)

    def next_tokens(self) -> list[int]:
        """What the next pass reads. The first call takes what is kept."""
        if self._kept is None:
            return self._prompt
        if self._reading is None:
            self._reading = self._kept.begin(self._prompt)
            self.position, self.cache = self._reading.position, self._reading.cache or self.cache
        return self._prompt[self.position : (self.position // BLOCK + 1) * BLOCK]

    def on_read(self, count: int) -> None:
        """A pass has read so many tokens more."""
        self.position += count
        if self._reading is not None and not self._has_ended:
            self._reading.on_read(self.cache, self.position)
        if self.is_complete:
            self.end()

    def end(self) -> None:
        """What is kept of the prompt may give way to others'."""
        if self._kept is not None and self._reading is not None and not self._has_ended:
            self._kept.end(self._reading)
        self._has_ended = True

"""Which prompts a main node keeps for later ones, and where it cuts them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from checkpoint import family
from checkpoint.block_store import BlockStore
from checkpoint.joint_blocks import joint_tokens
from checkpoint.kv_blocks import KVBlock, are_rows_only, why_not_kept
from checkpoint.prefix_cache import PrefixCache, PrefixReading
from main_node.chunks import Sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from main_node.request import Request

SMALL_BLOCK, BLOCK = 128, 256
"""Tokens of a block. Where blocks share a pass, small ones cost nothing but calls; else each loads its own experts."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVKeeping:
    """What is kept of earlier prompts' KV caches."""

    memory_bytes: int
    """Most bytes in memory."""
    directory: Path | None = None
    """Where they stay when the node ends."""
    disk_bytes: int = 0
    """Most bytes there."""
    rows_at_once: int = 0
    """As many rows of an expert as travel and are computed together; 0: some other number, which depends on all rows.
    Chunks share a pass only where no chunk's rows are divided."""
    computed_by: str = ""
    """The system and the devices that compute rows, in words: other ones may give other bits."""


class Cuts(NamedTuple):
    """Where a main node cuts prompts."""

    block: int
    """Tokens of a block."""
    together: int
    """Most tokens of blocks that are read in one pass, sharing each layer's experts; 0: each in a pass of its own."""


def cuts_of(config: PreTrainedConfig, keeping: KVKeeping, chunk: int, by_itself: bool) -> Cuts:
    """`chunk`: most tokens of a prompt that are read while others are answered; 0: no bound. `by_itself`: each pass
    reads one block, since something looks at its gates."""
    can_share = are_rows_only(config) and not by_itself
    block = min(SMALL_BLOCK, chunk or SMALL_BLOCK)
    together = keeping.rows_at_once // block * block if can_share else 0
    return Cuts(block, together) if together else Cuts(min(BLOCK, chunk or BLOCK), 0)


class KeptPrompts:
    """Of one main node. `keeping`: None, and nothing is kept. `chunk`, `by_itself`: see `cuts_of`. `rotates_by_length`:
    keys depend on the length of the prompt. `identity`: on what the bits of a row depend beside tokens, device and
    libraries, in words.

    Raises ConfigError for a directory that cannot be used.
    """

    def __init__(
        self,
        keeping: KVKeeping | None,
        config: PreTrainedConfig,
        device: torch.device,
        chunk: int,
        by_itself: bool,
        rotates_by_length: bool,
        identity: str,
    ) -> None:
        self.why_not = why_not_kept(config) if keeping is not None else ""
        """Why nothing is kept though it was asked for, in words."""
        if keeping is not None and rotates_by_length:
            self.why_not = f"{config.model_type} rotates keys by factors that depend on a prompt's length"
        self._prefix: PrefixCache | None = None
        self._together = self._joint = 0
        self.chunk = chunk
        """`chunk`, in whole blocks."""
        if self.why_not:
            _log.warning("--kv-memory: nothing is kept of earlier prompts: %s", self.why_not)
        elif keeping is not None:
            self._prefix, self._together = _prefix_cache(keeping, config, device, identity, chunk, by_itself)
            self.chunk -= chunk % self._prefix.block
        self.is_on = self._prefix is not None

    @contextmanager
    def reading(self, request: Request) -> Iterator[PrefixReading]:
        """Around the passes that read a request's prompt, if it `is_on`. Its cache has what was kept."""
        if self._prefix is None:
            raise RuntimeError("nothing is kept; ask is_on first")
        sequence = request.sequence
        with self._prefix.reading(sequence.prompt, find=request.prompt_scores is None) as reading:
            request.cached_tokens, request.is_cut = reading.position, reading.is_cut
            if reading.cache is not None:
                sequence.cache, reading.cache = reading.cache, None
            yield reading

    def join_blocks(self, model: Any) -> None:
        """Find out how many blocks a forward pass of this model may have."""
        if self._prefix is not None and self._together > self._prefix.block:
            self._joint = joint_tokens(model, self._prefix.block)

    def sizes(self, reading: PrefixReading) -> Sizes:
        return Sizes(reading.block, max(reading.block, self._joint))

    def most_tokens(self, request: Request, reading: PrefixReading) -> int:
        """Of a pass: several blocks that share each layer's experts, or one."""
        shared = self._together if request.prompt_scores is None else 0
        return max(reading.block, shared)

    def on_ended(self, request: Request) -> None:
        """Where an output of its passes may be wrong, so may be what is kept."""
        if request.is_doubted and self._prefix is not None:
            self._prefix.forget()

    @property
    def nbytes(self) -> int:
        """Of all that is kept in memory."""
        return self._prefix.store.nbytes if self._prefix is not None else 0

    def forget(self) -> None:
        """Nothing that is kept is found again."""
        if self._prefix is not None:
            self._prefix.forget()

    def close(self) -> None:
        if self._prefix is not None:
            self._prefix.close()


def _prefix_cache(
    keeping: KVKeeping, config: PreTrainedConfig, device: torch.device, identity: str, chunk: int, by_itself: bool
) -> tuple[PrefixCache, int]:
    """Also `Cuts.together`. Raises ConfigError."""
    cuts, disk = cuts_of(config, keeping, chunk, by_itself), None
    versions = f"torch {torch.__version__}, transformers {family.transformers_version()}"
    how = f"rows {keeping.rows_at_once}, together {bool(cuts.together)}, {torch.get_num_threads()} threads"
    how = f"{keeping.computed_by}, {how}"
    identity = f"{identity}, {device}, {versions}, {how}, blocks of {cuts.block}"
    if keeping.directory is not None:
        from checkpoint.kv_files import KVDirectory

        disk = KVDirectory(keeping.directory, keeping.disk_bytes, identity)
    store = BlockStore[KVBlock](keeping.memory_bytes)
    return PrefixCache(store, cuts.block, config, device, identity, disk), cuts.together

"""The prefix cache: blocks of the KV caches of earlier prompts, for prompts that begin with the same tokens.

Prompts are cut at multiples of a block, whether a block is found or read. So a block that is found has the bits that it
would have if it were read, and an answer does not depend on what is kept. Rows that decoding made have other bits:
they are not kept, and an answer's tokens are read as a prompt in the next turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from checkpoint.block_store import BlockStore, key_of
from checkpoint.kv_blocks import Key, KVBlock, cache_of, take_block

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class KVDisk(Protocol):
    """Where blocks stay when a node ends. See `checkpoint.kv_files.KVDirectory`."""

    def load(self, key: Key) -> KVBlock | None: ...

    def save(self, key: Key, block: KVBlock) -> None: ...

    def touch(self, chain: Sequence[Key]) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


class PrefixReading:
    """One prompt that is being read. `position`: so many of its tokens are in `cache`, which is None for 0."""

    def __init__(self, prefix: PrefixCache, prompt: Sequence[int]) -> None:
        self.position = 0
        self.cache: Any = None
        self.block = prefix.block
        self.is_cut = len(prompt) > prefix.block
        self.chain: list[Key] = []
        """Blocks in use, from the first token on."""
        self._prefix, self._epoch = prefix, prefix.store.epoch
        self._keys = list(prefix.keys(prompt))

    def find(self) -> None:
        """Take what is kept of the prompt, all but its last token."""
        blocks: list[KVBlock] = []
        for key in self._keys:
            block = self._prefix.use(key)
            if block is None:
                break
            self.chain.append(key)
            blocks.append(block)
        if blocks:
            self.cache = cache_of(self._prefix.config, blocks, self._prefix.device)
            self.position = blocks[-1].stop

    def on_read(self, cache: Any, stop: int) -> None:
        """A pass has read the tokens before position `stop`: keep the blocks that end there or before. `cache`: None
        where it may have lost bits, and nothing more is kept of this prompt."""
        if cache is None:
            self._keys = self._keys[: len(self.chain)]
        while len(self.chain) < len(self._keys):
            start = len(self.chain) * self.block
            if start + self.block > stop:
                return
            key = self._keys[len(self.chain)]
            if not self._prefix.keep(key, take_block(cache, start, start + self.block), self._epoch):
                self._keys = self._keys[: len(self.chain)]  # those after it could not be found
                return
            self.chain.append(key)


class PrefixCache:
    """Thread-safe. `identity`: everything on which the bits of a row depend beside the tokens, in words."""

    def __init__(
        self,
        store: BlockStore[KVBlock],
        block: int,
        config: PreTrainedConfig,
        device: torch.device,
        identity: str,
        disk: KVDisk | None = None,
    ) -> None:
        self.store, self.block, self.config, self.device = store, block, config, device
        self.tokens_found = 0
        """Tokens of prompts that were not read, so far."""
        self._root = key_of(b"", [*identity.encode(), block])
        self._disk = disk

    @contextmanager
    def reading(self, prompt: Sequence[int], find: bool = True) -> Iterator[PrefixReading]:
        """Around all passes that read a prompt. `find`: blocks are looked for; else all of it is read."""
        reading = self.begin(prompt, find)
        try:
            yield reading
        finally:
            self.end(reading)

    def begin(self, prompt: Sequence[int], find: bool = True) -> PrefixReading:
        """As `reading`, until `end`."""
        reading = PrefixReading(self, prompt)
        if find:
            try:
                reading.find()
            except BaseException:
                self.end(reading)
                raise
            self.tokens_found += reading.position
        return reading

    def end(self, reading: PrefixReading) -> None:
        self.store.release(reading.chain)
        if self._disk is not None:
            self._disk.touch(reading.chain)

    def keys(self, prompt: Sequence[int]) -> Iterator[Key]:
        """Of each block of a prompt that has a token after it: the last token is always read."""
        key = self._root
        for stop in range(self.block, len(prompt), self.block):
            key = key_of(key, prompt[stop - self.block : stop])
            yield key

    def use(self, key: Key) -> KVBlock | None:
        """A block, in use from now on."""
        epoch, block = self.store.epoch, self.store.use(key)
        if block is None and self._disk is not None and (found := self._disk.load(key)) is not None:
            block = found if self.store.put(key, found, epoch) else None
        return block

    def keep(self, key: Key, block: KVBlock, epoch: int) -> bool:
        """Whether a block is kept, in use from now on. `epoch`: when reading its prompt began."""
        if not self.store.put(key, block, epoch):
            return False
        if self._disk is not None:
            self._disk.save(key, block)
            if epoch != self.store.epoch:
                self._disk.clear()  # it was forgotten before the disk had it
        return True

    def forget(self) -> None:
        """Some block may be wrong, and so may those that were read after it: nothing that is kept is found again."""
        self.store.clear()
        if self._disk is not None:
            self._disk.clear()

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()

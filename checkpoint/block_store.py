"""Blocks of KV caches in memory, found by the tokens that they are of, within a number of bytes."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from checkpoint.kv_blocks import Key


def key_of(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of the block of `tokens` that follows the block `parent`."""
    return hashlib.blake2b(struct.pack(f"<{len(tokens)}q", *tokens), key=parent[:64], digest_size=20).digest()


class Sized(Protocol):
    """What is kept."""

    @property
    def nbytes(self) -> int: ...


Block = TypeVar("Block", bound=Sized)


class BlockStore(Generic[Block]):
    """Thread-safe. Least recently used blocks give way, those at the ends of chains first: whoever uses a block uses
    all before it. A block in use stays, and a new one for which there is no room is not kept.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        """Of all blocks."""
        self.epoch = 0
        """How often everything was forgotten."""
        self.evicted = 0
        """Blocks that gave way so far."""
        self._blocks: OrderedDict[Key, Block] = OrderedDict()
        """The least recently used first."""
        self._uses: Counter[Key] = Counter()
        self._lock = threading.Lock()

    def use(self, key: Key) -> Block | None:
        """The block, in use from now on until `release`; None where it is not here."""
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._uses[key] += 1
            return block

    def put(self, key: Key, block: Block, epoch: int | None = None) -> bool:
        """Keep a block, in use until `release`. False: there is no room, or everything was forgotten since `epoch`. One
        that is here stays as it is."""
        with self._lock:
            if epoch is not None and epoch != self.epoch:
                return False
            if key not in self._blocks:
                if not self._make_room(block.nbytes):
                    return False
                self._blocks[key] = block
                self.nbytes += block.nbytes
            self._uses[key] += 1
            return True

    def release(self, chain: Sequence[Key]) -> None:
        """Blocks of a chain, from its beginning on, are not in use any more. They count as used just now, those at the
        beginning last."""
        with self._lock:
            for key in reversed(chain):
                self._uses[key] -= 1
                if not self._uses[key]:
                    del self._uses[key]
                if key in self._blocks:
                    self._blocks.move_to_end(key)

    def clear(self) -> None:
        """No block shall be found again, in use or not."""
        with self._lock:
            self.epoch += 1
            self._blocks.clear()
            self.nbytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: Key) -> bool:
        return key in self._blocks

    def _make_room(self, nbytes: int) -> bool:
        free = self.most_bytes - self.nbytes
        leaving: list[Key] = []
        for key, block in self._blocks.items():
            if free >= nbytes:
                break
            if key not in self._uses:
                leaving.append(key)
                free += block.nbytes
        if free < nbytes:
            return False
        for key in leaving:
            self.nbytes -= self._blocks.pop(key).nbytes
        self.evicted += len(leaving)
        return True

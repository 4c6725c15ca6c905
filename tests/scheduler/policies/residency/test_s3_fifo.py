"""S3-FIFO against Algorithm 1 of the paper, retyped for keys that all may leave."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies.residency.s3_fifo import S3FIFO
from scheduler.types import ExpertId, ModelShape
from support.scheduling.cache_driver import Device

SHAPE = ModelShape((0,), 16, 1)


class Algorithm1:
    """READ, INSERT, EVICT, EVICTS and EVICTM of the paper, with newest first. An eviction frees one slot: one from M
    that a promotion made necessary is it."""

    def __init__(self, slots: int) -> None:
        self.slots, self.small_slots = slots, max(1, slots // 10)
        self.s: deque[int] = deque()
        self.m: deque[int] = deque()
        self.ghost: deque[int] = deque()
        self.freq: dict[int, int] = {}

    def read(self, x: int) -> bool:
        if x in self.s or x in self.m:
            self.freq[x] = min(self.freq[x] + 1, 3)
            return True
        if len(self.s) + len(self.m) >= self.slots:
            self.evict()
        if x in self.ghost:
            self.ghost.remove(x)
            self.m.appendleft(x)
        else:
            self.s.appendleft(x)
        self.freq[x] = 0
        return False

    def evict(self) -> None:
        if not (len(self.s) >= self.small_slots and self.evict_small()) and not self.evict_main():
            assert self.evict_small()

    def evict_small(self) -> bool:
        while self.s:
            t = self.s.pop()
            if self.freq[t] > 1:
                self.m.appendleft(t)
                self.freq[t] = 0
                if len(self.m) > self.slots - self.small_slots and self.evict_main():
                    return True
                continue
            self.ghost.appendleft(t)
            while len(self.ghost) > self.slots - self.small_slots:
                self.ghost.pop()
            return True
        return False

    def evict_main(self) -> bool:
        while self.m:
            t = self.m.pop()
            if self.freq[t] == 0:
                return True
            self.m.appendleft(t)
            self.freq[t] -= 1
        return False


@settings(max_examples=200)
@given(st.integers(1, 15), st.lists(st.integers(0, 15), max_size=200))
def test_s3_fifo_against_algorithm_1(slots: int, asked: list[int]) -> None:
    cache, paper = Device(S3FIFO(SHAPE), SHAPE, slots), Algorithm1(slots)
    for key in asked:
        assert cache.gate(0, [key]) == [paper.read(key)]
        assert {expert.expert for expert in cache.kept} == {*paper.s, *paper.m}


def test_one_use_each_does_not_flush_what_is_used_again() -> None:
    """The paper's point: a scan passes through the small queue."""
    cache = Device(S3FIFO(SHAPE), SHAPE, 4)
    for _ in range(3):
        cache.gate(0, [0])
    for number in range(1, 16):
        cache.gate(0, [number])
    assert ExpertId(0, 0) in cache.kept


@pytest.mark.parametrize("uses", [1, 2, 3])
def test_a_load_is_no_use(uses: int) -> None:
    """With two slots, one of them the small queue's, an expert is promoted from two uses more on."""
    cache = Device(S3FIFO(SHAPE), SHAPE, 2)
    for _ in range(uses):
        cache.gate(0, [0])
    cache.gate(0, [1])
    cache.gate(0, [2])
    assert (ExpertId(0, 0) in cache.kept) == (uses == 3)

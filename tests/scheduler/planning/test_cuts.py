"""Cuts of a stack of layers, beside brute force."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise
from random import Random

import pytest

from scheduler.planning.cuts import cut


def fullest(counts: tuple[int, ...], sizes: list[int], rooms: list[int], first: int, last: int) -> float:
    held, at = [0] * len(rooms), 0
    held[0] += first
    held[-1] += last
    for device, count in enumerate(counts):
        held[device] += sum(sizes[at : at + count])
        at += count
    return max(one / room for one, room in zip(held, rooms, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_the_fullest_device_is_as_little_full_as_can_be(seed: int) -> None:
    chance = Random(seed)
    sizes = [chance.randint(0, 9) for _ in range(chance.randint(1, 9))]
    rooms = [chance.randint(1, 40) for _ in range(chance.randint(1, 4))]
    first, last = chance.randint(0, 20), chance.randint(0, 20)
    found = cut(sizes, rooms, first, last)
    assert (len(found), sum(found)) == (len(rooms), len(sizes))
    every = [
        tuple(end - start for start, end in pairwise((0, *ends, len(sizes))))
        for ends in combinations_with_replacement(range(len(sizes) + 1), len(rooms) - 1)
    ]
    assert fullest(found, sizes, rooms, first, last) == min(fullest(c, sizes, rooms, first, last) for c in every)


def test_equal_layers_are_shared_by_the_devices_rooms() -> None:
    assert cut([5] * 32, [24, 24]) == (16, 16)
    assert cut([5] * 30, [24, 12]) == (20, 10)

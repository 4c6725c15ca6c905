"""Where a stack of layers is cut, so that consecutive layers share a device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise


def cut(sizes: Sequence[int], rooms: Sequence[int], first: int = 0, last: int = 0, least: int = 0) -> tuple[int, ...]:
    """How many consecutive layers each device gets, `least` or more, so that the fullest is as little full as can be.

    `sizes`: bytes of each layer. `rooms`: bytes of each device. `first`, `last`: bytes that the first and the last
    device hold beside their layers.
    """
    before, devices = [0, *accumulate(sizes)], len(rooms)
    more = [first, *[0] * (devices - 2), last] if devices > 1 else [first + last]

    @cache
    def best(device: int, start: int) -> tuple[float, tuple[int, ...]]:
        """(Share of the fullest device, ends) of the layers from `start` on over the devices from `device` on."""
        later_ones = devices - 1 - device
        ends = range(start + least, len(sizes) - least * later_ones + 1) if later_ones else (len(sizes),)
        found = []
        for end in ends:
            share = (before[end] - before[start] + more[device]) / rooms[device]
            later, cuts = best(device + 1, end) if later_ones else (0.0, ())
            found.append((max(share, later), (end, *cuts)))
        return min(found)

    return tuple(end - start for start, end in pairwise((0, *best(0, 0)[1])))

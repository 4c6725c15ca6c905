"""Which worker an expert goes to: groups in round robin (OD-MoE section 3.1), as pure functions of a turn number."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

from scheduler.errors import ConfigError


class Grouping(Protocol):
    """Which workers load for a layer. `workers`: those with slots, ascending, at least one."""

    def ring(self, workers: Sequence[int], turn: int) -> Iterator[int]:
        """All workers, the group of this turn first. `turn`: how many MoE layers decoding has visited before."""

    def group(self, workers: Sequence[int], turn: int) -> list[int]:
        """The workers that serve this turn's layer together."""

    def share(self, workers: Sequence[int], ordinal: int, experts: int) -> list[int]:
        """Prefill: the worker of each expert of the `ordinal`-th MoE layer."""


class RoundRobin:
    """Groups of `group_size`, taken in turn.

    The workers stand in a ring and a group is the next `group_size` of them. Where the size divides their number
    these are the paper's fixed groups; where it does not, no worker is left over and all load equally often.
    """

    def __init__(self, group_size: int) -> None:
        if group_size < 1:
            raise ConfigError(f"group-size is {group_size}; allowed: 1, 2, ... (usually the model's top-k)")
        self.group_size = group_size

    def ring(self, workers: Sequence[int], turn: int) -> Iterator[int]:
        start = turn * min(self.group_size, len(workers)) % len(workers)
        return itertools.chain(itertools.islice(workers, start, None), itertools.islice(workers, start))

    def group(self, workers: Sequence[int], turn: int) -> list[int]:
        size, count = self.group_size, len(workers)
        if size > count:
            size = count
        start = turn * size % count
        stop = start + size
        return [*workers[start:stop]] if stop <= count else [*workers[start:], *workers[: stop - count]]

    def share(self, workers: Sequence[int], ordinal: int, experts: int) -> list[int]:
        return [workers[(ordinal * experts + expert) % len(workers)] for expert in range(experts)]

"""Which worker an expert goes to: groups in round robin (OD-MoE section 3.1), as pure functions of a turn number."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from scheduler.errors import ConfigError

ALIKE, LEAST_S = 1.25, 1e-3
"""Workers count as equal if their times for an expert lie within this factor of the median, or within these seconds: so
far apart are measurements of equal machines."""
PLACES = 4
"""Places of a worker of the median's speed in a ring of uneven workers. The fastest has `PLACES` times as many."""


def weighted_ring(costs: Mapping[int, float]) -> tuple[int, ...]:
    """The workers in the order in which they take turns: each as often as its speed allows, as evenly as possible.

    `costs`: worker -> seconds of loading and computing one expert; 0 if unknown, which counts as the median. Equal
    workers stand in it once, ascending: the paper's ring. The others stand in it in proportion to their speeds, rounded
    to a quarter of the median's: a worker at half the speed half as often. Nobody is left out.
    """
    workers = sorted(costs)
    known = [cost for cost in costs.values() if cost > 0]
    median = statistics.median(known) if known else 0.0
    alike: dict[int, list[int]] = {}
    for worker in workers:
        alike.setdefault(_places(costs[worker] or median, median), []).append(worker)
    if alike.keys() <= {PLACES}:
        return tuple(workers)
    turns = [
        ((k + (number + 0.5) / len(some)) / places, worker)
        for places, some in alike.items()
        for number, worker in enumerate(some)
        for k in range(places)
    ]
    return tuple(worker for _, worker in sorted(turns))


def _places(cost: float, median: float) -> int:
    if abs(cost - median) <= LEAST_S or median / ALIKE <= cost <= median * ALIKE:
        return PLACES
    return min(max(1, round(PLACES * median / cost)), PLACES * PLACES)


class Grouping(Protocol):
    """Which workers load for a layer. `workers`: those with slots, in the order of their turns, at least one. A worker
    may stand there more than once (`weighted_ring`)."""

    def ring(self, workers: Sequence[int], turn: int) -> Iterator[int]:
        """All workers once, the group of this turn first. `turn`: how many MoE layers decoding has visited before."""

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
        order = itertools.chain(itertools.islice(workers, start, None), itertools.islice(workers, start))
        return iter(dict.fromkeys(order))

    def group(self, workers: Sequence[int], turn: int) -> list[int]:
        return [*itertools.islice(self.ring(workers, turn), self.group_size)]

    def share(self, workers: Sequence[int], ordinal: int, experts: int) -> list[int]:
        return [workers[(ordinal * experts + expert) % len(workers)] for expert in range(experts)]

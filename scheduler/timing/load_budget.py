"""Equation (1) of OD-MoE: how long a load may take before it stalls the main node."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoadBudget:
    """The longest load that is hidden, and the numbers that it follows from."""

    workers: int
    group_size: int
    groups: int
    main_s: float
    worker_s: float
    load_s: float
    max_load_s: float
    slack_s: float
    """`max_load_s` - `load_s`; below 0 the system is bound by loading."""

    @property
    def io_bound(self) -> bool:
        return self.slack_s < 0


def luck(since: float, ends: Sequence[float]) -> float | None:
    """The relative standard error of a token's time, and so of the token rate. None for fewer than two tokens.

    `ends`: the time at which each token was complete. The first one began at `since`.
    """
    times = [end - start for start, end in zip((since, *ends), ends, strict=False)]
    if len(times) < 2 or sum(times) <= 0:
        return None
    return statistics.stdev(times) / math.sqrt(len(times)) / statistics.fmean(times)


def load_budget(workers: int, group_size: int, main_s: float, worker_s: float, load_s: float) -> LoadBudget:
    """Equation (1): max load = (W/G) * t_main + (W/G - 1) * t_worker.

    A group that has computed a layer loads while the main node works on the next W/G layers and the other groups
    compute theirs. If G does not divide W, groups wrap around and the shortest turn counts: W/G rounded down.
    `main_s`, `worker_s`: one layer's task on the main node and one expert computation, each with its communication.
    Raises ConfigError.
    """
    if not 1 <= group_size <= workers:
        raise ConfigError(f"group-size is {group_size} with {workers} workers; allowed: 1 to {workers}")
    for name, value in (("main_s", main_s), ("worker_s", worker_s), ("load_s", load_s)):
        if value < 0:
            raise ConfigError(f"{name} is {value}; a duration cannot be negative")
    groups = workers // group_size
    max_load_s = groups * main_s + (groups - 1) * worker_s
    return LoadBudget(workers, group_size, groups, main_s, worker_s, load_s, max_load_s, max_load_s - load_s)

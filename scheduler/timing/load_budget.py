"""Equation (1) of OD-MoE: how long a load may take before the main node has to wait for it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoadBudget:
    """`max_load_s` and the numbers it came from. `slack_s` < 0: the system is bound by loading."""

    workers: int
    group_size: int
    groups: int
    main_s: float
    worker_s: float
    load_s: float
    max_load_s: float
    slack_s: float

    @property
    def io_bound(self) -> bool:
        return self.slack_s < 0


def luck(since: float, ends: Sequence[float]) -> float | None:
    """By how much a rate of tokens is uncertain, as a share of it: the standard error of a token's time. `ends`: when
    each was there, the first begun at `since`. None for fewer than two."""
    times = [end - begin for begin, end in zip((since, *ends), ends, strict=False)]
    if len(times) < 2 or sum(times) <= 0:
        return None
    return statistics.stdev(times) / math.sqrt(len(times)) / statistics.fmean(times)


def load_budget(workers: int, group_size: int, main_s: float, worker_s: float, load_s: float) -> LoadBudget:
    """Equation (1): a group that has computed a layer loads while the main node works on the next W/G layers and the
    other groups compute theirs: max load = (W/G) * t_main + (W/G - 1) * t_worker.

    Where G does not divide W, groups wrap around, and the shortest way round counts: W/G rounded down.
    `main_s`, `worker_s`: one layer's main-node task and one expert computation, each with its communication.
    Raises ConfigError.
    """
    if not 1 <= group_size <= workers:
        raise ConfigError(f"group-size is {group_size} with {workers} workers; allowed: 1 to {workers}")
    for name, value in (("main_s", main_s), ("worker_s", worker_s), ("load_s", load_s)):
        if value < 0:
            raise ConfigError(f"{name} is {value}; a duration cannot be negative")
    groups = workers // group_size
    allowed = groups * main_s + (groups - 1) * worker_s
    return LoadBudget(workers, group_size, groups, main_s, worker_s, load_s, allowed, allowed - load_s)

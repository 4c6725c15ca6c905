"""Where an expert is computed: on the device after a load, or on the host, where its weights are.

The fourth choice of a system. Which worker loads an expert is not a placement: see `scheduler.core.groups`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, measured at start or from a profile. A computation of n rows takes `call_s` + n `row_s`."""

    load_s: float
    device_call_s: float
    device_row_s: float
    host_call_s: float
    host_row_s: float

    def device_s(self, rows: int) -> float:
        return self.device_call_s + rows * self.device_row_s

    def host_s(self, rows: int) -> float:
        return self.host_call_s + rows * self.host_row_s


class Placement(Protocol):
    """Called at every gate if there is a host place. Without one, the device computes everything."""

    def host(
        self, missing: Mapping[int, int], resident: Mapping[int, int], costs: Costs, prefill: bool
    ) -> Collection[int]:
        """The experts that the host computes. Both mappings are expert -> rows.

        `missing`: experts that would have to be loaded, or whose load in flight ends after the host would have
        computed them. `resident`: the others.
        """


class DeviceOnly:
    """Everything is loaded and computed on the device."""

    def host(
        self, missing: Mapping[int, int], resident: Mapping[int, int], costs: Costs, prefill: bool
    ) -> Collection[int]:
        return ()


class HostOnly:
    """Every routed expert is computed on the host, resident or not (KTransformers as it is by default)."""

    def host(
        self, missing: Mapping[int, int], resident: Mapping[int, int], costs: Costs, prefill: bool
    ) -> Collection[int]:
        return {*missing, *resident}


class ResidentOnly:
    """Resident experts on the device, all others on the host: there are no demand loads."""

    def host(
        self, missing: Mapping[int, int], resident: Mapping[int, int], costs: Costs, prefill: bool
    ) -> Collection[int]:
        return set(missing)


class PrefillPipeline:
    """SMOE. In prefill, its Algorithm 1: an expert goes to the device if the host would take longer than the device and
    the load together; loads and computations then overlap. In decoding (IV-C) missing experts go to the host."""

    def host(
        self, missing: Mapping[int, int], resident: Mapping[int, int], costs: Costs, prefill: bool
    ) -> Collection[int]:
        if not prefill:
            return set(missing)
        return {e for e, rows in missing.items() if not costs.host_s(rows) > costs.device_s(rows) + costs.load_s}


class Balance:
    """The CPU-load balancer of importance, by the objective that it states (5.4): min max(T_load, T_CPU).

    The loads take turns on one link and cost the same, so of all splits with k loads the best loads the k experts with
    the most rows. So comparing the k = 0 ... n of them finds the optimum of all splits. Of equal ones the fewest loads.

    In prefill all experts go to the device, as in 4.1. Of equal rows the lower number counts as more. Assumed: a call
    on the host costs `host_call_s` besides its rows (printed: rows only).
    """

    def host(
        self, missing: Mapping[int, int], resident: Mapping[int, int], costs: Costs, prefill: bool
    ) -> Collection[int]:
        if prefill:
            return ()
        experts = sorted(missing, key=lambda e: (-missing[e], e))
        return set(experts[self._loads([costs.host_s(missing[e]) for e in experts], costs.load_s) :])

    def _loads(self, host_s: Sequence[float], load_s: float) -> int:
        """How many experts, from the first on, are loaded; the host computes the rest. `host_s`: seconds of each expert
        on the host, descending."""
        hosting = [*reversed(list(itertools.accumulate(reversed(host_s), initial=0.0)))]
        return min(range(len(hosting)), key=lambda k: (max(k * load_s, hosting[k]), k))


class PrintedBalance(Balance):
    """Algorithm 2 of importance as printed: two pointers over the experts, sorted by rows.

    While loading has taken no longer than the host so far, the expert with the most rows is loaded; else the one with
    the fewest goes to the host. So a lone expert is always loaded. With l seconds for a load and c seconds for an
    expert on the host, max(loading, host) exceeds the optimum by at most max(l - c of the last one loaded, c of the
    last one on the host - l, 0).
    """

    def _loads(self, host_s: Sequence[float], load_s: float) -> int:
        loading = hosting = 0.0
        left, right = 0, len(host_s) - 1
        while left <= right:
            if loading <= hosting:
                loading += load_s
                left += 1
            else:
                hosting += host_s[right]
                right -= 1
        return left

"""Where an expert is computed, where there are two places for it: the device, after a load, or the host, where it lies.

The fourth choice of a system. Which worker loads an expert is not a placement: see `scheduler.core.groups`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, as measured at start or as a profile has them. A computation of n rows takes `call_s` + n `row_s`."""

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
    """Asked at every gate, where there is a host place; where there is none, all is computed on the device."""

    def host(
        self, missing: Mapping[int, int], resident: Mapping[int, int], costs: Costs, prefill: bool
    ) -> Collection[int]:
        """Which experts the host computes. Both mappings are expert -> rows: `missing` would have to be loaded,
        `resident` are in a slot or on their way there."""


class DeviceOnly:
    """Everything is loaded and computed on the device."""

    def host(
        self, missing: Mapping[int, int], resident: Mapping[int, int], costs: Costs, prefill: bool
    ) -> Collection[int]:
        return ()


class HostOnly:
    """Every routed expert is computed on the host, resident or not (KTransformers' first way)."""

    def host(
        self, missing: Mapping[int, int], resident: Mapping[int, int], costs: Costs, prefill: bool
    ) -> Collection[int]:
        return {*missing, *resident}


class ResidentOnly:
    """What is resident is computed on the device, all else on the host: nothing is loaded for a gate. With a static hot
    set, as KTransformers and llama.cpp place experts."""

    def host(
        self, missing: Mapping[int, int], resident: Mapping[int, int], costs: Costs, prefill: bool
    ) -> Collection[int]:
        return set(missing)


class PrefillPipeline:
    """SMOE. Prefill, its Algorithm 1: an expert goes to the device where the host would take longer than the device and
    the load together; loads and computations then overlap. Decoding, IV-C: what is not resident, on the host."""

    def host(
        self, missing: Mapping[int, int], resident: Mapping[int, int], costs: Costs, prefill: bool
    ) -> Collection[int]:
        if not prefill:
            return set(missing)
        return {e for e, rows in missing.items() if not costs.host_s(rows) > costs.device_s(rows) + costs.load_s}


class Balance:
    """The CPU-load balancer of importance (5.4, Algorithm 2): two pointers over the experts by rows; while loading has
    taken no longer than the host so far, the one with the most rows is loaded, else the one with the fewest goes to the
    host. With l seconds a load and c seconds the host takes for an expert, max(loading, host) is at most the best
    there is plus max(l - c of the last one loaded, c of the last one on the host - l, 0).

    `best`: the best there is instead, which is to load the n with the most rows, for one n. Prefill: all on the device,
    as 4.1 has it. Equal rows: the lower number counts as more. Assumed: a call on the host costs `host_call_s` besides
    its rows (printed: rows only).
    """

    def __init__(self, best: bool = False) -> None:
        self.best = best

    def host(
        self, missing: Mapping[int, int], resident: Mapping[int, int], costs: Costs, prefill: bool
    ) -> Collection[int]:
        if prefill:
            return ()
        experts = sorted(missing, key=lambda e: (-missing[e], e))
        host_s = [costs.host_s(missing[e]) for e in experts]
        loads = best_loads(host_s, costs.load_s) if self.best else two_pointers(host_s, costs.load_s)
        return set(experts[loads:])


def two_pointers(host_s: Sequence[float], load_s: float) -> int:
    """Algorithm 2 of importance: how many of the first are loaded; the rest is the host's. `host_s`: descending."""
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


def best_loads(host_s: Sequence[float], load_s: float) -> int:
    """The same with the least max(loading, host), of equal ones the one with the fewest loads. All loads take as long:
    so none does better than to load those that the host would take longest for."""
    hosting = [*accumulate(reversed(host_s), initial=0.0)][::-1]
    return min(range(len(hosting)), key=lambda loads: max(loads * load_s, hosting[loads]))


class Hybrid:
    """HybriMoE's schedule, made anew for every gate, in prefill as in decoding: device, host and link each have a time
    line. The device computes resident experts first; the host takes missing ones from the fewest rows up, the link
    loads them from the most rows down, each time whichever of the two would be done with its expert first. A host that
    would be idle then takes over resident experts from the fewest rows up, while that ends earlier than the device
    would.

    Never later than all missing on the host, nor than all loaded. Assumed: equal ends go to the host, which spares a
    load; equal rows: the lower number counts as more.
    """

    def host(
        self, missing: Mapping[int, int], resident: Mapping[int, int], costs: Costs, prefill: bool
    ) -> Collection[int]:
        waiting = sorted(missing, key=lambda e: (-missing[e], e))
        device = sum(costs.device_s(rows) for rows in resident.values())
        taken: list[int] = []
        arrivals: list[tuple[float, float]] = []
        link = hosted = 0.0
        while waiting:
            by_host = hosted + costs.host_s(missing[waiting[-1]])
            computing = costs.device_s(missing[waiting[0]])
            by_device = max(device, link + costs.load_s) + computing
            if by_host <= by_device:
                taken.append(waiting.pop())
                hosted = by_host
            else:
                waiting.pop(0)
                link += costs.load_s
                device = by_device
                arrivals.append((link, computing))
        return {*taken, *_taken_over(resident, costs, hosted, arrivals)}


def _taken_over(
    resident: Mapping[int, int], costs: Costs, hosted: float, arrivals: Sequence[tuple[float, float]]
) -> list[int]:
    taken: list[int] = []
    computing = sum(costs.device_s(rows) for rows in resident.values())
    for expert in sorted(resident, key=lambda e: (resident[e], -e)):
        end = computing
        for arrival, seconds in arrivals:
            end = max(end, arrival) + seconds
        hosted += costs.host_s(resident[expert])
        if hosted >= end:
            break
        taken.append(expert)
        computing -= costs.device_s(resident[expert])
    return taken

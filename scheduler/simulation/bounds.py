"""The fewest misses of any cache that takes each missing expert into a slot, and the future that policies as bounds
read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from heapq import heappop, heappush

from scheduler.errors import ConfigError
from scheduler.policies.future import Future, KnownRequest, foresee
from scheduler.policies.registry import bounds
from scheduler.policies.strategy import Strategy
from scheduler.simulation.requests import Arrival
from scheduler.simulation.scenario import Scenario
from scheduler.types import ExpertId, Visit


@dataclass(frozen=True, slots=True)
class Misses:
    """Chosen experts that were in no slot when their gate fired, in decoding. What several rows or requests of a step
    choose counts once."""

    total: int
    optimal: int
    """As Belady's eviction has them in as much memory, without prefetches, on the same gates. A total below it is the
    work of prefetches."""


@dataclass(slots=True)
class Access:
    """The gates of one layer that fired together, and the experts that they chose. `counts`: in decoding."""

    layer: int
    chosen: set[int]
    counts: bool


class AccessLog:
    """The gates of a run, in their order."""

    def __init__(self) -> None:
        self.accesses: list[Access] = []
        self._requests: set[int] = set()  # whose gates are in the last access

    def add(self, visit: Visit, experts: Iterable[int], counts: bool) -> None:
        last = self.accesses[-1] if self.accesses else None
        if last is None or last.layer != visit.layer or last.counts != counts or visit.request in self._requests:
            last = Access(visit.layer, set(), counts)
            self.accesses.append(last)
            self._requests.clear()
        self._requests.add(visit.request)
        last.chosen.update(experts)


def optimal_misses(accesses: Sequence[Access], slots: int) -> int:
    """Misses of Belady's MIN from empty slots: every expert that is missing comes into a slot, in place of the one
    whose next use is farthest. Within a gate those that are there are used first, then the others one by one, the one
    that is used again soonest last."""
    resident: dict[ExpertId, int] = {}
    farthest: list[tuple[int, ExpertId]] = []
    misses = 0
    for one, uses in zip(accesses, _next_uses(accesses), strict=True):
        missing = [expert for expert in uses if expert not in resident]
        misses += len(missing) if one.counts else 0
        for expert in [expert for expert in uses if expert in resident] + missing:
            if expert not in resident and len(resident) >= slots:
                _evict(resident, farthest)
            resident[expert] = uses[expert]
            heappush(farthest, (-uses[expert], expert))
    return misses


def _next_uses(accesses: Sequence[Access]) -> list[dict[ExpertId, int]]:
    """For each access, its experts -> the place of each one's next use among all uses, the farthest first. Uses of one
    access are placed in that order, too: what is not used again soon can leave first."""
    at = sum(len(one.chosen) for one in accesses)
    never = at
    ahead: dict[ExpertId, int] = {}
    found: list[dict[ExpertId, int]] = []
    for one in reversed(accesses):
        uses = {
            expert: ahead.get(expert, never)
            for expert in (ExpertId(one.layer, number) for number in sorted(one.chosen))
        }
        uses = dict(sorted(uses.items(), key=lambda item: -item[1]))
        found.append(uses)
        at -= len(uses)
        ahead |= {expert: at + rank for rank, expert in enumerate(uses)}
    return found[::-1]


def _evict(resident: dict[ExpertId, int], farthest: list[tuple[int, ExpertId]]) -> None:
    """The heap may have entries of earlier uses."""
    while True:
        use, expert = heappop(farthest)
        if resident.get(expert) == -use:
            del resident[expert]
            return


def give_future(scenario: Scenario, strategy: Strategy, arrivals: Sequence[Arrival]) -> None:
    """To the policies that are bounds. Raises ConfigError with drafts, whose rows nobody knows beforehand."""
    chosen = bounds(scenario.system)
    if chosen and (scenario.draft or scenario.block > 1):
        named = ", ".join(f"--{field} {name}" for field, name in chosen.items())
        raise ConfigError(f"{named} knows the answer's routes, and not those of drafts; leave --draft out")
    if chosen:
        layers = scenario.profile.layers
        known = {number: _known(arrival, layers) for number, arrival in enumerate(arrivals, 1)}
        for policy in (strategy.residency, strategy.host_residency, strategy.predictor):
            foresee(policy, lambda: Future(known))


def _known(arrival: Arrival, layers: int) -> KnownRequest:
    workload = deepcopy(arrival.workload)  # one that draws keeps what it drew last
    prompt = [tuple(dict(workload.prompt(layer, 0, arrival.prompt_tokens))) for layer in range(layers)]
    answer = [[tuple(workload.routes(index, layer)) for layer in range(layers)] for index in range(arrival.tokens - 1)]
    return KnownRequest(arrival.prompt_tokens, prompt, answer)

"""What is to come, for policies that are bounds: they know every route beforehand, which only a simulation can."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from scheduler.types import ExpertId, Visit

NEVER = math.inf


@dataclass(slots=True)
class KnownRequest:
    """One request's routes. Layers count from 0. `prompt` [layers] and `answer` [passes][layers]: the experts that a
    gate chooses. The prompt is one pass, whatever its chunks are."""

    prompt_tokens: int
    prompt: list[tuple[int, ...]]
    answer: list[list[tuple[int, ...]]]
    _uses: dict[ExpertId, list[int]] = field(default_factory=dict)
    """Expert -> the visits that choose it, ascending, as `time_of` counts them."""

    def __post_init__(self) -> None:
        for number, layers in enumerate([self.prompt, *self.answer]):
            for layer, chosen in enumerate(layers):
                for expert in chosen:
                    self._uses.setdefault(ExpertId(layer, expert), []).append(number * len(layers) + layer)

    def time_of(self, visit: Visit) -> int:
        """The number of a visit, from 0 for the prompt's first layer."""
        return max(0, visit.position - self.prompt_tokens + 1) * len(self.prompt) + visit.layer

    def next_use(self, expert: ExpertId, now: int) -> float:
        """Visits from `now` to the next one that chooses the expert."""
        uses = self._uses.get(expert, [])
        after = bisect_right(uses, now)
        return uses[after] - now if after < len(uses) else NEVER


@dataclass(slots=True)
class Future:
    """The routes of all requests, by their numbers. Those that have not begun are not counted."""

    requests: Mapping[int, KnownRequest]
    _now: dict[int, int] = field(default_factory=dict)

    def on_gate_fired(self, visit: Visit) -> None:
        known = self.requests.get(visit.request)
        if known is not None:
            self._now[visit.request] = known.time_of(visit)

    def next_use(self, expert: ExpertId) -> float:
        """Visits until the next one that chooses the expert, over all requests in progress. `NEVER`: none does."""
        return min((self.requests[one].next_use(expert, now) for one, now in self._now.items()), default=NEVER)

    def chosen(self, visit: Visit) -> tuple[int, ...]:
        """What the gate of a decode pass will choose; empty after the answer's end."""
        known = self.requests.get(visit.request)
        index = visit.position - known.prompt_tokens if known is not None else -1
        return known.answer[index][visit.layer] if known is not None and 0 <= index < len(known.answer) else ()


class Clairvoyant:
    """A policy that reads the future. The simulator gives it; without one, nothing is known to be used again."""

    def __init__(self) -> None:
        self.future = Future({})


def foresee(policies: object, make: Callable[[], Future]) -> None:
    """Give a policy the future if it reads one. `make`: a future of its own."""
    if isinstance(policies, Clairvoyant):
        policies.future = make()

"""The one referee: what must hold of every answer whatever faults came, and what the faults cost."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from odmoe.chaos.load import Outcome
from odmoe.chaos.usage import Usage

MEMORY_GROWTH, COUNT_GROWTH, COUNT_MARGIN = 1.5, 1.2, 12
"""What a process may hold at the end over the start: bytes; threads and descriptors, so many more in any case."""
SHOWN = 5
"""Violations of one kind that are told one by one."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault. Times are of the monotonic clock: it began, it was over, all nodes served again."""

    fault: str
    victim: str
    at: float
    over: float
    whole: float
    missing: tuple[str, ...] = ()
    """Nodes that were not back in time."""


@dataclass(frozen=True, slots=True)
class Calm:
    """Answers without faults, one after the other."""

    outcomes: Sequence[Outcome]
    tokens_per_s: float
    usage: Mapping[str, Usage]

    @property
    def changed(self) -> int:
        """Answers that are not as before, or have no end."""
        return sum(one.is_changed or bool(one.error or one.defect) for one in self.outcomes)


@dataclass(frozen=True, slots=True)
class Cost:
    """What the faults of one kind have cost. Seconds; None: no answer was under way."""

    fault: str
    count: int
    pause_s: float | None
    """Median over the faults of the longest pause between two tokens."""
    worst_s: float | None
    back_s: float
    """Median from a fault's end until all nodes served again."""
    errors: int
    """Requests that ended with a typed error meanwhile."""


@dataclass(frozen=True, slots=True)
class Verdict:
    seconds: float
    requests: int
    tokens: int
    left: int
    refused: int
    """Wrong requests that were refused, as they must."""
    costs: list[Cost]
    errors: dict[str, int]
    """Of other requests, by class."""
    usage: dict[str, dict[str, float]]
    """By node: memory, threads, descriptors at the end over the start."""
    speed: float | None
    """Tokens a second at the end over the start, both without faults. None: the run was cut short."""
    violations: list[str] = field(default_factory=list)
    interrupted: str = ""
    """What was under way when somebody ended the run: the cluster was not looked at after the faults."""


def judge(
    outcomes: Sequence[Outcome],
    strikes: Sequence[Strike],
    before: Calm,
    after: Calm | None,
    *,
    seconds: float,
    hanging: int,
    missing: Sequence[str],
    bound_s: float,
    waits_for_place: bool = False,
    interrupted: str = "",
    unfinished: str = "",
) -> Verdict:
    """`hanging`: requests that were open beyond their bound. `missing`: nodes that did not come back at the end.
    `bound_s`: the longest time without progress. `waits_for_place`: there were more clients than requests that are
    answered at once, so the time to the first token has no bound. `after`: None if the run had no end: what was under
    way then is `interrupted`, or `unfinished` if its time was over."""
    held = after.usage if after else {}
    usage = {name: _ratios(before.usage[name], held[name]) for name in before.usage if name in held}
    wrong = [one for one in outcomes if one.prompt is None]
    right = [one for one in outcomes if one.prompt is not None]
    violations = [
        *_changed(outcomes),
        *(f"{one.fault} of {one.victim}: {', '.join(one.missing)} not back" for one in strikes if one.missing),
        *([f"{hanging} requests were open beyond their bound"] if hanging else []),
        *_late(outcomes, bound_s, waits_for_place),
        *([f"at the end these nodes do not serve: {', '.join(missing)}"] if missing else []),
        *_wrong_after(after),
        *(f"a wrong request was answered: {one.tokens}" for one in wrong if one.error is None and not one.defect),
        *_grown(before.usage, held),
        *([f"the run had no end in time: {unfinished}"] if unfinished else []),
    ]
    return Verdict(
        seconds=seconds,
        requests=len(right),
        tokens=sum(len(one.tokens) for one in right),
        left=sum(one.left for one in right),
        refused=sum(one.error is not None for one in wrong),
        costs=_costs(strikes, right),
        errors=dict(Counter(one.error.partition(":")[0] for one in right if one.error)),
        usage=usage,
        speed=after.tokens_per_s / before.tokens_per_s if after else None,
        violations=violations,
        interrupted=interrupted,
    )


def _wrong_after(after: Calm | None) -> list[str]:
    if after is None or not after.changed:
        return []
    return [f"{after.changed} of {len(after.outcomes)} answers were wrong after all faults"]


def _changed(outcomes: Sequence[Outcome]) -> list[str]:
    changed = [one for one in outcomes if one.prompt is not None and one.is_changed]
    found = [
        f"tokens {one.tokens} in place of {one.prompt.expected[: one.count]}" for one in changed[:SHOWN] if one.prompt
    ]
    if len(changed) > SHOWN:
        found.append(f"{len(changed)} answers had other tokens than without faults")
    return found + [f"an error without a type: {one.defect}" for one in outcomes if one.defect][:SHOWN]


def _late(outcomes: Sequence[Outcome], bound_s: float, waits_for_place: bool) -> list[str]:
    longest = [gap for one in outcomes if (gap := one.stalled_s(from_first=waits_for_place)) > bound_s]
    found = [f"a request had no progress for {gap:.1f} s; its bound is {bound_s:g} s" for gap in longest[:SHOWN]]
    return [*found, *([f"{len(longest)} requests were beyond that bound"] if len(longest) > SHOWN else [])]


def _ratios(before: Usage, after: Usage) -> dict[str, float]:
    return {
        "memory": after.memory_bytes / before.memory_bytes,
        "threads": after.threads / before.threads,
        "descriptors": after.descriptors / before.descriptors,
    }


def _grown(before: Mapping[str, Usage], after: Mapping[str, Usage]) -> list[str]:
    found = []
    for name in before.keys() & after.keys():
        one, other = before[name], after[name]
        if other.memory_bytes > one.memory_bytes * MEMORY_GROWTH:
            found.append(f"{name} holds {other.memory_bytes >> 20} MiB, {one.memory_bytes >> 20} before")
        for what in ("threads", "descriptors"):
            had, has = getattr(one, what), getattr(other, what)
            if has > max(had * COUNT_GROWTH, had + COUNT_MARGIN):
                found.append(f"{name} has {has} {what}, {had} before")
    return found


def _costs(strikes: Sequence[Strike], outcomes: Sequence[Outcome]) -> list[Cost]:
    kinds: dict[str, list[Strike]] = {}
    for strike in strikes:
        kinds.setdefault(strike.fault, []).append(strike)
    return [_cost(name, found, outcomes) for name, found in kinds.items()]


def _cost(name: str, strikes: Sequence[Strike], outcomes: Sequence[Outcome]) -> Cost:
    pauses = []
    errors = 0
    for strike in strikes:
        met = [one for one in outcomes if one.times[0] < strike.whole and one.times[-1] > strike.at]
        errors += sum(one.error is not None and strike.at <= one.times[-1] <= strike.whole for one in met)
        gaps = [gap for one in met if (gap := one.longest_pause(strike.at, strike.whole)) > 0]
        if gaps:
            pauses.append(max(gaps))
    back = statistics.median(strike.whole - strike.over for strike in strikes)
    median, worst = (statistics.median(pauses), max(pauses)) if pauses else (None, None)
    return Cost(name, len(strikes), median, worst, back, errors)

"""A plan: the expected speed and memory of a cluster for a model, and the single change that would help most."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.errors import ConfigError
from scheduler.planning.changes import compared, trials
from scheduler.planning.scaling import (
    DRAFTED,
    PROMPTS,
    TOGETHER,
    Change,
    Each,
    Run,
    Setup,
    Together,
    at_once,
    choose,
    equation_1,
    fitted,
    memory,
    outcome,
    rates,
    scaled,
)
from scheduler.timing.load_budget import LoadBudget, luck
from scheduler.timing.profile import Profile


@dataclass(frozen=True, slots=True)
class Plan:
    """The expected speed and memory of a setup, and what single changes would do."""

    setup: Setup
    profile: Profile
    """The base profile, scaled to the model and the hardware."""
    budget: LoadBudget
    """Equation (1) for the chosen group size."""
    group_size: int
    slots: int
    tried: dict[tuple[int, int], float]
    """(group size, slots) -> tokens/s."""
    tokens_per_s: float
    together: dict[Together, float]
    """Tokens/s of several requests at once."""
    drafted: dict[Together, float]
    """The same where the shadow drafts; empty without a shadow."""
    fits: tuple[float, ...]
    """Tokens/s with the times of each other fit of the base profile."""
    luck: float | None
    """The relative standard error of `tokens_per_s` over random routes and mispredictions. Everything that is compared
    with it uses the same ones."""
    ideal_tokens_per_s: float
    """The speed if loads took no time."""
    ttft_s: dict[int, float]
    """By the number of tokens of the prompt."""
    bound: str | None
    where: dict[str, float]
    """Seconds per token, by cause."""
    memory: dict[str, int]
    """Bytes by node."""
    changes: tuple[Change, ...]
    """Best first."""


def _drafting(drafted: dict[Together, float], tokens_per_s: float) -> list[Change]:
    """The best of the drafts that one request may have, as a change."""
    alone = [(rate, one) for one, rate in drafted.items() if one.requests == 1]
    if not alone or not tokens_per_s:
        return []
    rate, one = max(alone, key=lambda pair: pair[0])
    return [Change(f"drafts of the shadow (--draft {one.draft})", rate, rate / tokens_per_s)]


def make_plan(setup: Setup, step: Callable[[], None] = lambda: None, each: Each = map) -> Plan:
    """Plan for a setup. `step`: called after each simulation. `each`: runs several simulations; the figures do not
    depend on it. Raises ConfigError, DoesNotFitError."""
    if not 1 <= setup.hardware.workers:
        raise ConfigError(f"workers is {setup.hardware.workers}; allowed: 1, 2, ...")
    tried = choose(setup, step, each)
    (group_size, slots), rate = next(iter(tried.items()))
    profile = scaled(setup)
    blocks = DRAFTED if setup.policy.system.predictor == "sep" else ()
    fits, changes = list(fitted(setup)), trials(setup, group_size, slots)
    together, drafted, at_fits, (ideal,), changed, *changed_at_fits = _in_one_batch(
        [Run(setup, group_size, slots, together=one) for one in TOGETHER],
        [Run(setup, group_size, slots, together=one) for one in blocks],
        [Run(one, group_size, slots) for one in fits],
        [Run(at_once(setup), group_size, slots)],
        [one.run for one in changes],
        *(one.at_fits(fits) for one in changes),
        step=step,
        each=each,
    )
    found = outcome(setup, group_size, slots)
    rates_drafted = dict(zip(blocks, drafted, strict=True))
    every = [
        compared(one, now, now_at_fits, rate, at_fits)
        for one, now, now_at_fits in zip(changes, changed, changed_at_fits, strict=True)
    ]
    every = [*_drafting(rates_drafted, rate), *every]
    return Plan(
        setup=setup,
        profile=profile,
        budget=equation_1(profile, group_size),
        group_size=group_size,
        slots=slots,
        tried=tried,
        tokens_per_s=rate,
        together=dict(zip(TOGETHER, together, strict=True)),
        drafted=rates_drafted,
        fits=tuple(at_fits),
        luck=luck(found.ttft_s, found.token_s),
        ideal_tokens_per_s=ideal,
        ttft_s={n: outcome(setup, group_size, slots, 2, n).ttft_s for n in PROMPTS},
        bound=found.bound,
        where=found.where,
        memory=memory(setup, slots),
        changes=tuple(sorted(every, key=lambda change: -change.factor)),
    )


def _in_one_batch(*parts: list[Run], step: Callable[[], None], each: Each) -> list[list[float]]:
    """The decode tokens/s of the runs of each part. All are simulated beside each other, in their order."""
    found = iter(rates(each, step, itertools.chain(*parts)))
    return [list(itertools.islice(found, len(part))) for part in parts]

"""A plan: the expected speed and memory of a cluster for a model, and the single change that would help most.

What is known first comes first: an `Estimate` of one request, after few simulations, then the rest of the `Plan`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from scheduler.errors import ConfigError
from scheduler.planning.changes import compare_speeds, trials
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
    compared_tokens,
    details,
    equation_1,
    memory,
    other_fits,
    rates,
    room_of,
    scale_profile,
)
from scheduler.planning.shadow_devices import shadow_shares
from scheduler.timing.load_budget import LoadBudget
from scheduler.timing.profile import Profile


@dataclass(frozen=True, slots=True)
class Estimate:
    """The expected speed of one request, and memory."""

    setup: Setup
    profile: Profile
    """The base profile, scaled to the model and the hardware."""
    budget: LoadBudget
    """Equation (1) for the chosen group size."""
    group_size: int
    slots: int
    tried: dict[tuple[int, int], float]
    """(group size, slots) -> tokens/s, of others than the chosen by what they have of its speed in shorter answers."""
    tokens_per_s: float
    compared: float
    """Tokens/s of the chosen in an answer of `compared_tokens`, to which others of that length are compared."""
    luck: float | None
    """The relative standard error of `tokens_per_s` over random routes and mispredictions. Everything that is compared
    with it uses the same ones."""
    ideal_tokens_per_s: float
    """The speed if loads took no time."""
    bound: str | None
    where: dict[str, float]
    """Seconds per token, by cause."""
    memory: dict[str, int]
    """Bytes by node."""

    @property
    def machines(self) -> int:
        """The main node, the shadow and each worker have one of their own."""
        return 1 + (self.setup.policy.shadow != "none") + self.setup.hardware.workers


@dataclass(frozen=True, slots=True)
class Plan(Estimate):
    """The expected speed and memory of a setup, and what single changes would do."""

    together: dict[Together, float]
    """Tokens/s of several requests at once."""
    drafted: dict[Together, float]
    """The same if the shadow drafts; empty without a shadow."""
    fits: tuple[float, ...]
    """Tokens/s with the times of each other fit of the base profile."""
    ttft_s: dict[int, float]
    """By the number of tokens of the prompt."""
    changes: tuple[Change, ...]
    """Best first."""


def _drafting(drafted: dict[Together, float], tokens_per_s: float) -> list[Change]:
    """The best of the drafts that one request may have, as a change."""
    alone = [(rate, one) for one, rate in drafted.items() if one.requests == 1]
    if not alone or not tokens_per_s:
        return []
    rate, one = max(alone, key=lambda pair: pair[0])
    return [Change(f"drafts of the shadow (--draft {one.draft})", rate, rate / tokens_per_s)]


def check_setup(setup: Setup) -> None:
    """Whether it can be planned. Raises ConfigError, DoesNotFitError."""
    if not 1 <= setup.hardware.workers:
        raise ConfigError(f"workers is {setup.hardware.workers}; allowed: 1, 2, ...")
    scale_profile(setup)
    room_of(setup)
    shadow_shares(setup)


def make_estimate(setup: Setup, step: Callable[[], None] = lambda: None, each: Each = map) -> Estimate:
    """The first part of a plan. `step`: called after each simulation. `each`: runs several simulations; the figures do
    not depend on it. Raises ConfigError, DoesNotFitError."""
    check_setup(setup)
    profile = scale_profile(setup)
    tried = choose(setup, step, each)
    (group_size, slots), short = next(iter(tried.items()))
    whole = Run(setup, group_size, slots)
    ideal = replace(whole, setup=at_once(setup), tokens=compared_tokens(setup.model))
    found, quick = each(_first, [whole, ideal])
    step()
    unit = short or 1.0
    return Estimate(
        setup=setup,
        profile=profile,
        budget=equation_1(profile, group_size),
        group_size=group_size,
        slots=slots,
        tried={pair: rate / unit * found.tokens_per_s for pair, rate in tried.items()},
        tokens_per_s=found.tokens_per_s,
        compared=short,
        luck=found.luck,
        ideal_tokens_per_s=max(quick, found.tokens_per_s),  # mispredictions cost it nothing, so that few tokens do
        bound=found.bound,
        where=found.where,
        memory=memory(setup, slots),
    )


def _first(run: Run) -> Any:
    """Details of a whole answer; the tokens/s of a shorter one."""
    return details(run) if run.tokens is None else next(iter(rates(map, lambda: None, [run])))


def make_plan(
    setup: Setup,
    step: Callable[[], None] = lambda: None,
    each: Each = map,
    estimate: Estimate | None = None,
) -> Plan:
    """Plan for a setup, whose first part is there already or is made. Otherwise as `make_estimate`."""
    known = estimate or make_estimate(setup, step, each)
    group_size, slots, rate = known.group_size, known.slots, known.tokens_per_s
    tokens = compared_tokens(setup.model)
    blocks = DRAFTED if setup.policy.system.predictor == "sep" else ()
    others = list(other_fits(setup))
    base_s = setup.hardware.base.load_s
    far = sorted(others, key=lambda one: -abs(one.hardware.base.load_s - base_s))[:1]  # the others lie between
    changes = trials(setup, group_size, slots)
    drafted, together, at_fits, ttft_s, changed, unchanged_far, *changed_far = _in_one_batch(
        [Run(setup, group_size, slots, together=one) for one in blocks],
        [Run(setup, group_size, slots, together=one) for one in TOGETHER],
        [Run(one, group_size, slots, tokens) for one in others],
        [Run(setup, group_size, slots, prompt=count) for count in PROMPTS],
        [replace(one.run, tokens=tokens) for one in changes],
        [Run(one, group_size, slots, tokens) for one in far],
        *([replace(run, tokens=tokens) for run in one.at_fits(far)] for one in changes),
        step=step,
        each=each,
    )
    rates_drafted = dict(zip(blocks, drafted, strict=True))
    every = [
        compare_speeds(one, now, now_far, known.compared, unchanged_far, rate)
        for one, now, now_far in zip(changes, changed, changed_far, strict=True)
    ]
    every = [*_drafting(rates_drafted, rate), *every]
    return Plan(
        **{field.name: getattr(known, field.name) for field in fields(Estimate)},
        together=dict(zip(TOGETHER, together, strict=True)),
        drafted=rates_drafted,
        fits=tuple(rate * at_fit / known.compared for at_fit in at_fits if known.compared),
        ttft_s=dict(zip(PROMPTS, ttft_s, strict=True)),
        changes=tuple(sorted(every, key=lambda change: -change.factor)),
    )


def _in_one_batch(*parts: list[Run], step: Callable[[], None], each: Each) -> list[list[float]]:
    """The decode tokens/s of the runs of each part. All are simulated beside each other, in their order."""
    found = iter(rates(each, step, itertools.chain(*parts)))
    return [list(itertools.islice(found, len(part))) for part in parts]

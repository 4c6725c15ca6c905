"""A plan: what a cluster would do for a model, and which one change would help most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.errors import ConfigError
from scheduler.planning.scaling import (
    PROMPTS,
    Change,
    Setup,
    at_once,
    choose,
    equation_1,
    memory,
    outcome,
    scaled,
    speed,
)
from scheduler.timing.load_budget import LoadBudget, luck
from scheduler.timing.profile import Profile


@dataclass(frozen=True, slots=True)
class Plan:
    """`budget`: equation (1) for the chosen groups. `tried`: (group size, slots) -> tokens/s. `ttft_s`: by tokens of
    the prompt. `luck`: by what share `tokens_per_s` is uncertain, routes and mistakes being drawn by chance (the same
    ones for all that is compared with it). `ideal_tokens_per_s`: if loading took no time. `where`: seconds a token by
    what was waited for. `memory`: bytes by node. `changes`: best first."""

    setup: Setup
    profile: Profile
    budget: LoadBudget
    group_size: int
    slots: int
    tried: dict[tuple[int, int], float]
    tokens_per_s: float
    luck: float | None
    ideal_tokens_per_s: float
    ttft_s: dict[int, float]
    bound: str | None
    where: dict[str, float]
    memory: dict[str, int]
    changes: tuple[Change, ...]


def make_plan(setup: Setup, step: Callable[[], None] = lambda: None) -> Plan:
    """`step`: called before each simulation. Raises ConfigError, DoesNotFitError."""
    from scheduler.planning.changes import changes  # it plans the same way

    if not 1 <= setup.hardware.workers:
        raise ConfigError(f"workers is {setup.hardware.workers}; allowed: 1, 2, ...")
    tried = choose(setup, step)
    (group_size, slots), rate = next(iter(tried.items()))
    profile = scaled(setup)
    budget = equation_1(profile, group_size)
    found = outcome(setup, group_size, slots)
    return Plan(
        setup=setup,
        profile=profile,
        budget=budget,
        group_size=group_size,
        slots=slots,
        tried=tried,
        tokens_per_s=rate,
        luck=luck(found.ttft_s, found.token_s),
        ideal_tokens_per_s=speed(at_once(setup), group_size, slots),
        ttft_s={n: outcome(setup, group_size, slots, 2, n).ttft_s for n in PROMPTS},
        bound=found.bound,
        where=found.where,
        memory=memory(setup, slots),
        changes=changes(setup, group_size, slots, rate, step),
    )

"""The scheduler on a virtual clock: the same core as in real runs, a heap of events, and the times of a profile.

scenario = Scenario(find_profile("rtx3090-1gbe"), tokens=64)
simulate(scenario, random_workload(scenario, recall=0.97)).decode_tokens_per_s
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.build import make_core
from scheduler.core.stats import RequestStats
from scheduler.errors import ConfigError
from scheduler.policies.strategy import Strategy
from scheduler.policies.system_config import SystemConfig
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.time_breakdown import TimeBreakdown, bound_by
from scheduler.simulation.workload import Workload
from scheduler.simulation.world import REQUEST, World
from scheduler.timing.links import MainLinks
from scheduler.trace import Span


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulated request. Times are seconds from its start."""

    ttft_s: float
    """The time of the first token."""
    token_s: list[float]
    """The end of each decode pass."""
    stats: RequestStats
    spans: list[Span]
    where: dict[str, float]
    """Seconds of an average decode token by cause, see `scheduler.simulation.time_breakdown`."""
    events: int
    """The number of events."""

    @property
    def decode_tokens_per_s(self) -> float | None:
        """None for an answer of one token."""
        return len(self.token_s) / (self.token_s[-1] - self.ttft_s) if self.token_s else None

    @property
    def tokens_per_s(self) -> float:
        """The rate of the whole answer, including prefill."""
        return (1 + len(self.token_s)) / (self.token_s[-1] if self.token_s else self.ttft_s)

    @property
    def bound(self) -> str | None:
        """The bottleneck of decoding: compute, network, load or shadow. None without a decode pass."""
        return bound_by(self.where) if self.token_s else None


def simulate(
    scenario: Scenario,
    workload: Workload,
    spans: bool = False,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Outcome:
    """Answer one request. `spans`: whether to keep every node's spans. `progress`: called with the number of tokens so
    far.

    Raises ConfigError if there are too few slots for the residency, or if a policy reads scores that the workload
    lacks.
    """
    profile, system = scenario.profile, scenario.system
    core = make_core(scenario.core_config)
    core.strategy.residency.check(scenario.shape, scenario.worker_count * scenario.slots)
    _check_scores(system, core.strategy, workload)
    waits = TimeBreakdown(profile.load_s, system.predictor != "none")
    kept: list[Span] | None = [] if spans else None
    links = MainLinks(profile, duplex=system.prefill == "ahead")
    world = World(
        core, profile, links, workload, scenario.prompt_tokens, scenario.tokens, waits, kept, system.departure
    )
    world.start(scenario.worker_count, scenario.slots, system.predictor == "sep", scenario.host, scenario.form_costs)
    for count in range(1, scenario.tokens + 1):
        if not world.run(count):
            raise ConfigError(f"the simulated request stopped after {count - 1} tokens, because no event is left")
        progress(count)
    world.drain()
    stats = world.core.stats[REQUEST]
    stats.close()
    first, *rest = world.done
    where = {cause: seconds / max(1, len(rest)) for cause, seconds in waits.seconds.items()}
    return Outcome(first, rest, stats, kept or [], where, world.events.count)


def _check_scores(system: SystemConfig, strategy: Strategy, workload: Workload) -> None:
    """Raises ConfigError naming the flag of a policy that reads scores that the workload lacks."""
    if lacking := unscored(system, strategy, workload):
        has = workload.foresight if workload.scored and workload.foresight else "none of it"
        raise ConfigError(
            f"{lacking}, but these routes come with {has}; simulate the routes (--routes) of a run that was recorded "
            "with this policy"
        )


def unscored(system: SystemConfig, strategy: Strategy, workload: Workload) -> str | None:
    """The first policy that reads what the workload lacks, and what that is; None if there is none."""
    needed = strategy.predictor.foresight
    readers = [
        ("router", system.router, strategy.router.wants_scores),
        ("residency", system.residency, strategy.residency.wants_scores),
        ("precision", system.precision, strategy.precision.wants_scores),
    ]
    for flag, name, reads in readers:
        if reads and not workload.scored:
            return f"--{flag} {name} reads the scores of gates"
    if needed is not None and workload.foresight != needed:
        return f"--predictor {system.predictor} reads what the main model foresees ({needed})"
    return None

"""The scheduler on a virtual clock: the same core as in real runs, a heap of events, and the times of a profile.

scenario = Scenario(find_profile("rtx3090-1gbe"), tokens=64)
simulate(scenario, random_workload(scenario, recall=0.97)).decode_tokens_per_s

several = replace(scenario, requests=8)
simulate_requests(several, random_arrivals(several, recall=0.97)).decode_tokens_per_s
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from scheduler.build import make_core
from scheduler.core.stats import RequestStats
from scheduler.drafts.length import DraftLengths
from scheduler.errors import ConfigError
from scheduler.policies.registry import keeps_all
from scheduler.policies.strategy import Strategy
from scheduler.policies.system_config import SystemConfig
from scheduler.simulation.bounds import AccessLog, Misses, give_future, optimal_misses
from scheduler.simulation.requests import Arrival, SimulatedRequest
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.time_breakdown import bound_by
from scheduler.simulation.workload import Workload
from scheduler.simulation.world import World
from scheduler.trace import Span


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's answer. Times are seconds from its arrival."""

    ttft_s: float
    """The time of the first token."""
    token_s: list[float]
    """The time of each further token. Those of a block come at once."""
    stats: RequestStats
    arrived_s: float = 0.0
    """Seconds from the simulation's start."""

    @property
    def ends_s(self) -> list[float]:
        """The time of every token."""
        return [self.ttft_s, *self.token_s]

    @property
    def gaps_s(self) -> list[float]:
        """The time between each token and the next."""
        return [end - start for start, end in pairwise(self.ends_s)]

    @property
    def decode_tokens_per_s(self) -> float | None:
        """None for an answer of one token."""
        return len(self.token_s) / (self.token_s[-1] - self.ttft_s) if self.token_s else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The simulated requests, and the nodes that answered them."""

    answers: tuple[Answer, ...]
    spans: list[Span]
    where: dict[str, float]
    """Seconds of an average step that decodes, by cause, see `scheduler.simulation.time_breakdown`. A step of a lone
    request is a token."""
    steps: int
    """Steps that decode."""
    union: float | None
    """Different experts of a layer that the rows of an average step need, if it only decodes; None without any."""
    events: int
    """The number of events."""
    misses: Misses | None = None
    """None unless asked for, and if every expert has a slot of its own or a host computes: that takes no slot."""
    drafted: tuple[int, int, int] = (0, 0, 0)
    """Where the shadow drafts: passes that decode, their rows, and the tokens that they gave."""

    @property
    def answer(self) -> Answer:
        """That of the only request. Raises ValueError if there are several."""
        (only,) = self.answers
        return only

    @property
    def ttft_s(self) -> float:
        """Mean of the requests."""
        return fmean(one.ttft_s for one in self.answers)

    @property
    def token_s(self) -> list[float]:
        """Of the only request."""
        return self.answer.token_s

    @property
    def stats(self) -> RequestStats:
        """Of the only request."""
        return self.answer.stats

    @property
    def decoded_tokens(self) -> int:
        """Tokens of all answers but the first ones."""
        return sum(len(one.token_s) for one in self.answers)

    @property
    def decode_s(self) -> float:
        """Seconds in which they came: from the earliest first token to the last one of all."""
        ends = [[one.arrived_s + end for end in one.ends_s] for one in self.answers]
        return max(of[-1] for of in ends) - min(of[0] for of in ends)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """The rate of all requests together. None if each answer has one token."""
        return self.decoded_tokens / self.decode_s if self.decoded_tokens else None

    @property
    def tokens_s(self) -> float:
        """Seconds from the first arrival to the last token of all."""
        return max(one.arrived_s + one.ends_s[-1] for one in self.answers) - min(o.arrived_s for o in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """The rate of all answers, including prefill."""
        return (self.decoded_tokens + len(self.answers)) / self.tokens_s

    @property
    def gaps_s(self) -> list[float]:
        """Every time between a token of a request and its next one, ascending."""
        return sorted(gap for one in self.answers for gap in one.gaps_s)

    @property
    def loads_a_token(self) -> float | None:
        """Loads begun in decoding, by tokens of all."""
        return (
            sum(one.stats.decode_loads for one in self.answers) / self.decoded_tokens if self.decoded_tokens else None
        )

    @property
    def bottleneck(self) -> str | None:
        """The bottleneck of decoding: compute, network, load or shadow. None without a decode pass."""
        return bound_by(self.where) if self.decoded_tokens else None


def simulate(
    scenario: Scenario,
    workload: Workload,
    spans: bool = False,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Outcome:
    """Answer one request of the scenario's length. See `simulate_requests`."""
    arrival = Arrival(workload, scenario.prompt_tokens, scenario.tokens)
    return simulate_requests(scenario, [arrival], spans, progress)


def simulate_requests(
    scenario: Scenario,
    arrivals: Sequence[Arrival],
    spans: bool = False,
    progress: Callable[[int], None] = lambda tokens: None,
    lengths: DraftLengths | None = None,
    count_misses: bool = False,
) -> Outcome:
    """Answer requests together, at most `Scenario.parallel` of them at once. `spans`: whether to keep every node's
    spans. `progress`: called with the number of tokens so far, of all. `lengths`: of drafts, as requests before have
    left them, whose steps say what rows cost; None: new ones. `count_misses`: those of the best eviction, too.

    Raises ConfigError if there are too few slots for the residency, or if a policy reads scores that a workload lacks.
    """
    core = make_core(scenario.core_config)
    core.strategy.residency.check(scenario.shape, scenario.total_slots)
    for arrival in arrivals:
        _check_scores(scenario, core.strategy, arrival.workload)
    give_future(scenario, core.strategy, arrivals)
    kept: list[Span] | None = [] if spans else None
    log = AccessLog() if count_misses and _has_misses(scenario) else None
    world = World(core, scenario, arrivals, kept, lengths, log)
    world.start()
    total, count = sum(arrival.tokens for arrival in arrivals), 0
    while count < total:
        if not world.run(count + 1):
            raise ConfigError(f"the simulated requests stopped after {count} tokens, because no event is left")
        count = world.tokens
        progress(count)
    world.drain()
    answers = tuple([_answer(world, request) for request in world.queue.requests])
    steps = world.breakdown.steps
    where = {cause: seconds / max(1, steps) for cause, seconds in world.breakdown.seconds.items()}
    drafts = [request.drafts for request in world.queue.requests if request.drafts is not None]
    drafted = sum(one.blocks for one in drafts), sum(one.rows for one in drafts), sum(one.gained for one in drafts)
    total_missed = sum(answer.stats.missed for answer in answers)
    misses = Misses(total_missed, optimal_misses(log.accesses, scenario.total_slots)) if log else None
    return Outcome(answers, kept or [], where, steps, world.main.union_size, world.events.count, misses, drafted)


def _has_misses(scenario: Scenario) -> bool:
    return not keeps_all(scenario.system) and not (scenario.host and scenario.system.placement != "device")


def _answer(world: World, request: SimulatedRequest) -> Answer:
    stats = world.core.stats[request.number]
    stats.close()
    first, *rest = [end - request.arrived for end in request.done]
    return Answer(first, rest, stats, request.arrived)


def _check_scores(scenario: Scenario, strategy: Strategy, workload: Workload) -> None:
    """Raises ConfigError naming the flag of a policy that reads scores that the workload lacks."""
    reads = strategy.wants_scores or strategy.predictor.foresight is not None
    if scenario.block > 1 and reads:
        raise ConfigError(f"a block has {scenario.block} rows; policies that read scores are simulated with 1 only")
    if scenario.draft and reads:
        raise ConfigError(f"--draft is {scenario.draft}; policies that read scores are simulated without drafts only")
    if lacking := missing_scores(scenario.system, strategy, workload):
        has = workload.foresight if workload.has_scores and workload.foresight else "none of it"
        raise ConfigError(
            f"{lacking}, but these routes come with {has}; simulate the routes (--routes) of a run that was recorded "
            "with this policy"
        )


def missing_scores(system: SystemConfig, strategy: Strategy, workload: Workload) -> str | None:
    """The first policy that reads what the workload lacks, and what that is; None if there is none."""
    needed = strategy.predictor.foresight
    readers = [
        ("router", system.router, strategy.router.wants_scores),
        ("residency", system.residency, strategy.residency.wants_scores),
        ("precision", system.precision, strategy.precision.wants_scores),
    ]
    for flag, name, reads in readers:
        if reads and not workload.has_scores:
            return f"--{flag} {name} reads the scores of gates"
    if needed is not None and workload.foresight != needed:
        return f"--predictor {system.predictor} reads what the main model foresees ({needed})"
    return None

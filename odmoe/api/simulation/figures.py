"""The figures of simulated requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from odmoe.api.simulation.scenarios import Run
from odmoe.settings.simulate_settings import SimulateSettings
from scheduler.core.stats import RecallCounts
from scheduler.policies.system_config import SystemConfig
from scheduler.simulation.route_model import name_of
from scheduler.simulation.simulate import Answer, Outcome
from scheduler.simulation.time_breakdown import bound_by
from scheduler.simulation.workload import SAME_TOKEN
from scheduler.timing.load_budget import luck


class Shape(NamedTuple):
    """Of the simulated model."""

    layers: int
    experts: int
    top_k: int


class Gap(NamedTuple):
    """Seconds between two tokens of a request."""

    median: float
    worst: float


class MissShares(NamedTuple):
    """Misses of decoding, by token: `total`, and its two parts."""

    total: float
    working_set: float
    """Belady's eviction would have them, too, in as many slots."""
    policy: float
    """It would not."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one request."""

    ttft_s: float
    decode_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class RecordedSpeed(Speed):
    """Of one request, beside what was recorded."""

    recorded_ttft_s: float
    recorded_decode_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Simulation:
    """The figures of a simulation, in seconds and tokens a second; docs/reports.md explains them by these names. Means
    over requests weight each token equally, means over steps each step."""

    profile: str
    model: Shape
    workers: int
    slots: int
    host_slots: int | None
    group_size: int
    system: str | None
    system_config: SystemConfig
    host: bool
    align_token: int
    align_kv: int
    mini_batch: int | None
    seed: int
    routes: str | None
    route_model: str | None
    prompt_tokens: list[int]
    tokens: list[int]
    at_once: int
    interval: float
    prefill_chunk: int
    batch_dense: bool
    draft: int | str
    rows_a_pass: float | None
    tokens_a_pass: float | None
    accepted: float | None
    acceptance: float | None
    acceptance_given: bool
    ttft_s: float
    ttft_worst_s: float
    decode_tokens_per_s: float | None
    token_gap_s: Gap | None
    luck: float | None
    tokens_per_s: float
    loads_a_token: float | None
    reloads_a_token: float | None
    loads_from_memory: float | None
    tokens_a_step: float | None
    experts_a_layer: float | None
    hit_rate: float | None
    misses_a_token: MissShares | None
    recall: float | None
    where_ms: dict[str, float]
    bound: str | None
    requests: list[Speed]
    trace: str | None
    events: int
    wall_s: float
    simulated_tokens_per_s: float

    def as_dict(self) -> dict[str, Any]:
        """The object that `odmoe simulate --json` prints."""
        found: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            found |= asdict(value) if name == "system_config" else {name: value}
        return found | {
            "model": self.model._asdict(),
            "misses_a_token": self.misses_a_token and self.misses_a_token._asdict(),
            "token_gap_s": self.token_gap_s and self.token_gap_s._asdict(),
            "requests": [asdict(one) for one in self.requests],
        }


def figures_of(runs: list[Run], outcomes: list[Outcome], took_s: float, given: SimulateSettings) -> Simulation:
    """`took_s`: seconds that the simulation took."""
    scenario, p = runs[0].scenario, runs[0].scenario.profile
    arrivals = [arrival for run in runs for arrival in run.arrivals]
    answers = [answer for outcome in outcomes for answer in outcome.answers]
    decoded = sum(outcome.decoded_tokens for outcome in outcomes)
    steps = sum(outcome.steps for outcome in outcomes)
    where = {
        cause: sum(outcome.where[cause] * outcome.steps for outcome in outcomes) / max(1, steps)
        for cause in outcomes[0].where
    }
    tallies = [answer.stats.overall for answer in answers]
    recall = RecallCounts(sum(counts.correct for counts in tallies), sum(counts.activated for counts in tallies)).recall
    tokens, gaps = decoded + len(answers), sorted(gap for outcome in outcomes for gap in outcome.gaps_s)
    unions = [(outcome.union, outcome.steps) for outcome in outcomes if outcome.union is not None]
    rows_a_pass, tokens_a_pass, accepted = _draft_figures(outcomes)
    return Simulation(
        profile=p.name,
        model=Shape(p.layers, p.experts, p.top_k),
        workers=scenario.worker_count,
        slots=scenario.slots,
        host_slots=scenario.host_slots,
        group_size=scenario.group,
        system=runs[0].system,
        system_config=scenario.system,
        host=scenario.host,
        align_token=scenario.alignment.token_period,
        align_kv=scenario.alignment.kv_period,
        mini_batch=scenario.mini_batch,
        seed=given.seed,
        routes=given.routes,
        route_model=name_of(scenario.route_model) if given.routes is None else None,
        prompt_tokens=[arrival.prompt_tokens for arrival in arrivals],
        tokens=[arrival.tokens for arrival in arrivals],
        at_once=max(len(run.arrivals) for run in runs) if given.parallel is None else given.parallel,
        interval=given.interval,
        prefill_chunk=scenario.prefill_chunk,
        batch_dense=scenario.batch_dense,
        draft=scenario.draft,
        rows_a_pass=rows_a_pass,
        tokens_a_pass=tokens_a_pass,
        accepted=accepted,
        acceptance=_acceptance(runs, given) if scenario.draft else None,
        acceptance_given=given.acceptance is not None,
        ttft_s=sum(answer.ttft_s for answer in answers) / len(answers),
        ttft_worst_s=max(answer.ttft_s for answer in answers),
        decode_tokens_per_s=decoded / sum(outcome.decode_s for outcome in outcomes) if decoded else None,
        token_gap_s=Gap(median(gaps), gaps[-1]) if gaps else None,
        luck=luck(answers[0].ttft_s, answers[0].token_s)
        if given.routes is None and len(answers) == 1 and not scenario.draft
        else None,
        tokens_per_s=tokens / sum(outcome.tokens_s for outcome in outcomes),
        loads_a_token=sum(answer.stats.decode_loads for answer in answers) / decoded if decoded else None,
        reloads_a_token=sum(answer.stats.reloads for answer in answers) / decoded if decoded else None,
        loads_from_memory=_loads_from_memory(answers) if scenario.host_slots is not None else None,
        tokens_a_step=decoded / steps if decoded else None,
        experts_a_layer=sum(union * of for union, of in unions) / sum(of for _, of in unions) if unions else None,
        hit_rate=_hit_rate(answers),
        misses_a_token=_misses(outcomes, decoded),
        recall=recall,
        where_ms={cause: seconds * 1e3 for cause, seconds in where.items()},
        bound=bound_by(where) if decoded else None,
        requests=[speed for run, outcome in zip(runs, outcomes, strict=True) for speed in _by_request(run, outcome)],
        trace=given.trace,
        events=sum(outcome.events for outcome in outcomes),
        wall_s=took_s,
        simulated_tokens_per_s=tokens / took_s,
    )


def _hit_rate(answers: list[Answer]) -> float | None:
    """Share of decoding's chosen experts that were in a slot when the gate fired. None without decoding."""
    named = sum(answer.stats.named for answer in answers)
    return sum(answer.stats.present for answer in answers) / named if named else None


def _loads_from_memory(answers: list[Answer]) -> float | None:
    """Share of all loads that found their expert in host memory. None without loads."""
    loads = sum(answer.stats.loads for answer in answers)
    return sum(answer.stats.loads_from_memory for answer in answers) / loads if loads else None


def _misses(outcomes: list[Outcome], decoded: int) -> MissShares | None:
    """None without decoding, and if the outcomes have none."""
    found = [outcome.misses for outcome in outcomes if outcome.misses is not None]
    if not found or not decoded:
        return None
    total, optimal = sum(one.total for one in found), sum(one.optimal for one in found)
    working_set = min(total, optimal)
    return MissShares(total / decoded, working_set / decoded, (total - working_set) / decoded)


def _acceptance(runs: list[Run], given: SimulateSettings) -> float:
    """Share of the shadow's own tokens that are the main model's: as given, as recorded, or as is assumed."""
    if given.acceptance is not None:
        return given.acceptance
    known = [right for run in runs for one in run.measured or () for right in one.drafts.values()]
    return sum(known) / len(known) if known else SAME_TOKEN


def _draft_figures(outcomes: list[Outcome]) -> tuple[float | None, float | None, float | None]:
    """Mean rows and tokens of a pass that decodes; the share of verified drafts that were right. None without
    drafts."""
    blocks, rows, gained = (sum(column) for column in zip(*(outcome.drafted for outcome in outcomes), strict=True))
    drafts = rows - blocks
    return (
        rows / blocks if blocks else None,
        gained / blocks if blocks else None,
        (gained - blocks) / drafts if drafts else None,
    )


def _by_request(run: Run, outcome: Outcome) -> Iterator[Speed]:
    """The speed of each request, and the recorded speed."""
    for number, answer in enumerate(outcome.answers):
        if run.measured is None:
            yield Speed(answer.ttft_s, answer.decode_tokens_per_s)
        else:
            was = run.measured[number]
            yield RecordedSpeed(answer.ttft_s, answer.decode_tokens_per_s, was.ttft_s, was.decode_tokens_per_s)

"""`odmoe.plan`: speed and memory of a model on machines that need not exist yet."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from checkpoint.sizes.dense_size import saved_in_store
from odmoe.api.names import named_as_keywords, path_of, table_of
from odmoe.api.plan_model import Described, model_of, read_config
from odmoe.machines.cluster_file import read_cluster_file
from odmoe.settings.bounds import check_slots
from odmoe.settings.machine_texts import machines_of_hosts, parse_machines
from odmoe.settings.plan_settings import CONTEXT, HOME_PROFILE, PlanSettings
from odmoe.settings.units import parse_sizes
from odmoe.simulation_pool import simulation_pool
from scheduler.errors import ConfigError
from scheduler.planning.assumptions import list_assumptions
from scheduler.planning.machine_plan import Home, Improvement, MachineAdvice, advise, improve
from scheduler.planning.plan import Estimate, Plan, check_setup, make_estimate, make_plan
from scheduler.planning.scaling import Change, Each, Hardware, Policy, Setup, Together, best, workers_needed
from scheduler.planning.shadow_devices import shadow_shares
from scheduler.policies.system_config import SystemConfig
from scheduler.timing.load_budget import LoadBudget
from scheduler.timing.profile import find_profile
from scheduler.types import ModelSize

if TYPE_CHECKING:
    from odmoe.settings.keywords import PlanKeywords

Say = Callable[[str], None]
Status = Callable[[], contextlib.AbstractContextManager[Say]]
_NO_FORK = ("torch", "grpc", "ray")
"""Libraries with threads of their own, which a forked process would lack."""


class Tried(NamedTuple):
    """A choice of group size and slots, and its speed."""

    group_size: int
    slots: int
    tokens_per_s: float


class AtOnce(NamedTuple):
    """The speed of several requests together."""

    requests: int
    batch_dense: bool
    tokens_per_s: float


class Drafted(NamedTuple):
    """The speed of several requests together, if the shadow drafts."""

    requests: int
    draft: int | str
    """Drafts of a block, or `auto`."""
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The figures of a plan, in seconds, bytes and tokens a second; docs/reports.md explains them by these names."""

    model: ModelSize
    workers: int
    machines: int
    """One each for the main node, the shadow if there is one, and every worker."""
    equation_1: LoadBudget
    """If `slack_s` is below 0, a load takes that much too long."""
    group_size: int
    slots: int
    tried: list[Tried]
    shadow: str
    recall: float | None
    prefill: str
    decode_tokens_per_s: float
    decode_tokens_per_s_by_fit: list[float]
    """With the times of each other fit of the profile."""
    decode_luck: float | None
    """The relative standard error of the simulated rate."""
    requests_at_once: list[AtOnce]
    drafts_at_once: list[Drafted]
    decode_tokens_per_s_if_loads_took_no_time: float
    ttft_s: dict[int, float]
    """By the number of tokens of the prompt."""
    bound: str | None
    where_s: dict[str, float]
    """Seconds of a token, by cause."""
    memory_bytes: dict[str, int]
    """By node."""
    shadow_bytes: list[int]
    """On each device of the shadow; empty if their memory is not given."""
    context: int
    helps_most: Change | None
    changes: list[Change]
    """Best first."""
    assumed: list[str]

    def as_dict(self) -> dict[str, Any]:
        """The object that `odmoe plan --json` prints."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        budget = self.equation_1
        more = {"holds": not budget.io_bound, "workers_needed": workers_needed(budget)}
        return fields | {
            "model": asdict(self.model) | {"expert_bytes": self.model.expert_bytes},
            "equation_1": asdict(budget) | more,
            "tried": [one._asdict() for one in self.tried],
            "requests_at_once": [one._asdict() for one in self.requests_at_once],
            "drafts_at_once": [one._asdict() for one in self.drafts_at_once],
            "ttft_s": {str(tokens): seconds for tokens, seconds in self.ttft_s.items()},
            "helps_most": asdict(self.helps_most) if self.helps_most else None,
            "changes": [asdict(change) for change in self.changes],
        }


def plan(model: str | os.PathLike[str], **settings: Unpack[PlanKeywords]) -> PlanReport:
    """The speed and memory to expect of a cluster for a model, and the change that would help most.

    `model`: a directory, its config.json, a GGUF file, a store, or org/name on the Hub. `settings`: those of `odmoe
    plan --help`, with underscores. Raises ConfigError, CheckpointError, DoesNotFitError.
    """
    if lines := {"machine", "cluster"} & {*settings}:  # no keywords for a type checker
        raise ConfigError(f"{min(lines)} is a setting of the command line; run odmoe plan --machine ... --json")
    path = path_of("model", model, "a directory, its config.json, a GGUF file, a store, or org/name on the Hub")
    with named_as_keywords():
        return report_of(
            plan_from_settings(table_of(PlanSettings, {**settings, "model": path}, "a setting of odmoe plan"))
        )


def plan_from_settings(
    settings: PlanSettings,
    status: Status = lambda: contextlib.nullcontext(_silent),
    on_setup: Callable[[Setup], None] = lambda setup: None,
    on_estimate: Callable[[Estimate], None] = lambda estimate: None,
) -> Plan:
    """`status`: begins to show the progress, with threads if it likes. `on_setup`: gets what is planned, before it is
    simulated; `on_estimate`: the first part of the plan. No progress is shown while these are called. Raises
    ConfigError, CheckpointError, DoesNotFitError, SimulationError."""
    settings.check_together()
    hardware, policy = _setup(settings)
    found = read_config(settings.model)  # before torch is imported, so that a wrong path is rejected at once
    with _processes() as each:
        with status() as say:
            say("counting the model's parameters")
            model = _model(settings, found, aligned=settings.shadow != "none")
        kept = settings.kv_memory
        setup = Setup(model, hardware, policy, kept, kept if len(hardware.shadow_bytes) < 2 else 0)
        count = _counting()
        check_setup(setup)
        on_setup(setup)
        with status() as say:
            estimate = make_estimate(setup, lambda: say(next(count)), each)
        on_estimate(estimate)
        with status() as say:
            return make_plan(estimate.setup, lambda: say(next(count)), each, estimate)


def advise_from_settings(
    settings: PlanSettings,
    status: Status = lambda: contextlib.nullcontext(_silent),
    on_advice: Callable[[MachineAdvice], None] = lambda advice: None,
) -> tuple[MachineAdvice, list[Improvement]]:
    """What to run on the machines of the settings, and what would help, best first. `status`: as in
    `plan_from_settings`. `on_advice`: gets the first part. Raises ConfigError, CheckpointError, DoesNotFitError,
    SimulationError."""
    settings.check_together()
    base = find_profile(settings.profile if settings.is_given("profile") else HOME_PROFILE)
    replicas: int | None = None
    if settings.cluster is None:
        machines = parse_machines(settings.machine, base)
    else:
        cluster = read_cluster_file(Path(settings.cluster))
        machines = machines_of_hosts(settings.machine, [host.name for host in cluster.hosts], base)
        replicas = cluster.replicas
    found = read_config(settings.model)
    with _processes() as each:
        with status() as say:
            say("counting the model's parameters")
            home = Home(base, _model(settings, found, aligned=False), machines, settings.kv_memory, replicas)
            say("simulating layouts")
            advice = advise(home, each)
        on_advice(advice)
        with status() as say:
            say("simulating changes")
            return advice, improve(advice, each)


def _model(settings: PlanSettings, found: Described, aligned: bool) -> ModelSize:
    """Raises CheckpointError, ConfigError."""
    dtype, experts = settings.dtype or found.dtype, found.experts or settings.experts
    context, dense = settings.context or CONTEXT, settings.dense if found.manifest is None else None
    model = model_of(settings.model, found.fields, dtype, context, experts, aligned, found.native_bits, dense)
    if found.manifest is not None:
        model = replace(model, dense_saved=saved_in_store(found.manifest, model.item_bytes))
    if settings.context is not None and model.context < settings.context:
        raise ConfigError(f"--context is {settings.context}; allowed: 1 to {model.context}, the model's limit")
    return model


def _silent(text: str) -> None:
    """Shows nothing."""


def _setup(settings: PlanSettings) -> tuple[Hardware, Policy]:
    base = find_profile(settings.profile)
    workers = settings.workers or base.workers
    if settings.group_size is not None and settings.group_size > workers:
        raise ConfigError(f"--group-size is {settings.group_size}; allowed: 1 to --workers ({workers})")
    if settings.slots is not None:
        check_slots(workers, settings.slots)
    hardware = Hardware(
        base,
        workers,
        settings.worker_memory,
        settings.load_bandwidth,
        settings.link,
        shadow_bytes=parse_sizes(settings.shadow_memory),
    )
    policy = Policy(
        settings.shadow,
        settings.recall,
        SystemConfig(prefill=settings.prefill),
        group_size=settings.group_size,
        slots=settings.slots,
    )
    return hardware, policy


@contextlib.contextmanager
def _processes() -> Iterator[Each]:
    """Processes that simulate, if this one may be forked."""
    if any(name in sys.modules for name in _NO_FORK):
        yield map
        return
    with simulation_pool() as each:
        yield each


def _counting() -> Iterator[str]:
    return (f"{done} simulation{'s' * (done > 1)} so far" for done in itertools.count(1))


def report_of(found: Plan) -> PlanReport:
    """The figures of a plan."""
    policy = found.setup.policy
    alone = [AtOnce(1, batched, found.tokens_per_s) for batched in (False, True)]
    return PlanReport(
        model=found.setup.model,
        workers=found.budget.workers,
        machines=found.machines,
        equation_1=found.budget,
        group_size=found.group_size,
        slots=found.slots,
        tried=[Tried(group, slots, rate) for (group, slots), rate in found.tried.items()],
        shadow=policy.shadow,
        recall=policy.expected_recall if policy.shadow != "none" else None,
        prefill=policy.chosen.prefill,
        decode_tokens_per_s=found.tokens_per_s,
        decode_tokens_per_s_by_fit=list(found.fits),
        decode_luck=found.luck,
        requests_at_once=[*alone, *(AtOnce(one.requests, one.batch_dense, rate) for one, rate in _at_once(found))],
        drafts_at_once=[Drafted(one.requests, one.draft, rate) for one, rate in reversed(found.drafted.items())],
        decode_tokens_per_s_if_loads_took_no_time=found.ideal_tokens_per_s,
        ttft_s=found.ttft_s,
        bound=found.bound,
        where_s=found.where,
        memory_bytes=found.memory,
        shadow_bytes=shadow_shares(found.setup),
        context=found.setup.model.context,
        helps_most=best(found.changes),
        changes=list(found.changes),
        assumed=list_assumptions(found.profile, found.setup.hardware, policy),
    )


def _at_once(found: Plan) -> list[tuple[Together, float]]:
    """Tokens/s of several requests, fewest first."""
    return sorted(found.together.items(), key=lambda one: (one[0].requests, one[0].batch_dense))

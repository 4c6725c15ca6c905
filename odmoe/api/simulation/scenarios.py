"""From settings, and a recording, to scenarios."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from odmoe.settings.bounds import check_experts, check_slots
from odmoe.settings.simulate_settings import SimulateSettings
from odmoe.settings.system_settings import CHOSEN, check_read
from odmoe.settings.table import flag
from odmoe.settings.units import AUTO_SLOTS, parse_memory, parse_speeds
from scheduler.alignment import Alignment
from scheduler.errors import ConfigError
from scheduler.eventlog.recording import Recording, read_recording
from scheduler.policies.registry import caches, keeps_all, needs_host, remembers_routes, strategy_of
from scheduler.policies.system_config import CoreConfig, SystemConfig
from scheduler.policies.systems import SYSTEMS
from scheduler.simulation.recorded_forms import recorded_expert_bytes, recorded_form_costs, recorded_profile
from scheduler.simulation.recorded_routes import SHADOW, RecordedWorkload, recorded_groups, recorded_workloads
from scheduler.simulation.requests import Arrival, random_arrivals
from scheduler.simulation.route_model import LIKE_TEXT, ROUTE_MODELS, RouteModel, find_route_model
from scheduler.simulation.scenario import RECALL, Scenario
from scheduler.simulation.simulate import missing_scores
from scheduler.simulation.workload import SAME_TOKEN
from scheduler.timing.profile import Profile, find_profile
from scheduler.types import ModelShape, WorkerJoined

_OF_ROUTES = ("route_model", "prompt_tokens", "layers", "experts", "top_k", "requests", "interval", "prefill_chunk")
"""Settings that a recording determines."""


@dataclass(frozen=True, slots=True)
class Run:
    """Requests to simulate together. `measured`: the recorded requests, if they are."""

    scenario: Scenario
    system: str | None
    """The preset's name. None: a recording's, whose preset is not known here."""
    arrivals: list[Arrival]
    measured: list[RecordedWorkload] | None = None


def runs_of(given: SimulateSettings) -> list[Run]:
    """What is simulated together. Raises ConfigError."""
    if given.routes is None:
        return [_random_run(given)]
    from scheduler.simulation.routing_trace import find_trace  # NumPy is for these files alone

    trace = find_trace(given.routes)
    return _traced_runs(given, trace) if trace is not None else _recorded_runs(given, Path(given.routes))


def _random_run(given: SimulateSettings) -> Run:
    profile = find_profile(given.profile)
    profile = replace(
        profile,
        layers=given.layers or profile.layers,
        experts=given.experts or profile.experts,
        top_k=given.top_k or profile.top_k,
    )
    if profile.top_k > profile.experts:
        raise ConfigError(f"--top-k is {profile.top_k} with {profile.experts} experts; allowed: 1 to {profile.experts}")
    check_experts(profile.layers, profile.experts)
    scenario = _scenario(given, profile, None, given.prompt_tokens, given.tokens)
    recall = RECALL if given.recall is None and scenario.system.predictor == "sep" else given.recall
    same_token = SAME_TOKEN if given.acceptance is None else given.acceptance
    scenario = replace(scenario, route_model=_route_model(given, scenario))
    arrivals = random_arrivals(scenario, recall, given.seed, same_token)
    if lacking := missing_scores(scenario.system, strategy_of(scenario.shape, scenario.system), arrivals[0].workload):
        flags = " ".join(f"{flag(name)} {getattr(given, name)}" for name in ("system", *CHOSEN) if given.is_given(name))
        raise ConfigError(
            f"{lacking}, which only a recorded run has; give --routes many-moe, or record a run first: odmoe generate "
            f"{flags} --record FILE ..., then odmoe simulate {flags} --routes FILE"
        )
    return Run(scenario, given.system, arrivals)


def _traced_runs(given: SimulateSettings, file: Path) -> list[Run]:
    """Every request of a routing trace, at the profile's times; all of them together with --parallel."""
    from scheduler.simulation.routing_trace import read_trace, traced_workloads

    for name in _OF_ROUTES:
        if given.is_given(name):
            raise ConfigError(f"{flag(name)} is given with --routes; {file} has its own value")
    trace = read_trace(file)
    profile = replace(find_profile(given.profile), layers=trace.layers, experts=trace.num_experts, top_k=trace.top_k)
    check_experts(profile.layers, profile.experts)
    system = _scenario(given, profile, None, 1, 1).system
    shape = ModelShape(tuple(range(trace.layers)), trace.num_experts, trace.top_k)
    workloads = traced_workloads(trace, strategy_of(shape, system).predictor.foresight)
    together = [workloads] if given.parallel is not None else [[one] for one in workloads]
    return [_traced_run(given, profile, group, file) for group in together]


def _traced_run(given: SimulateSettings, profile: Profile, group: list[RecordedWorkload], file: Path) -> Run:
    """Requests that are answered together. What a shadow predicts is drawn."""
    for one in group:
        one.acceptance = SAME_TOKEN if given.acceptance is None else given.acceptance
        one.recall, one.seed = RECALL if given.recall is None else given.recall, given.seed
    arrivals = _arrivals(given, group, file)
    prompt, tokens = (max(getattr(one, name) for one in arrivals) for name in ("prompt_tokens", "tokens"))
    scenario = _scenario(given, profile, None, prompt, tokens)
    lacking = missing_scores(scenario.system, strategy_of(scenario.shape, scenario.system), group[0])
    if lacking:
        raise ConfigError(f"{lacking}, which {file} does not have; export a recording of a run with this policy")
    return Run(scenario, given.system, arrivals)


def _arrivals(given: SimulateSettings, group: list[RecordedWorkload], file: Path) -> list[Arrival]:
    """Each joins the step that it joined then, unless --parallel is given. Raises ConfigError."""
    arrivals = []
    for one in group:
        tokens = given.tokens if given.is_given("tokens") else one.tokens
        if tokens > one.tokens:
            raise ConfigError(
                f"--tokens is {tokens}; allowed: 1 to {one.tokens}, as request {one.number} of {file} has"
            )
        arrivals.append(Arrival(one, one.prompt_tokens, tokens, step=one.step if given.parallel is None else 0))
    return arrivals


def _route_model(given: SimulateSettings, scenario: Scenario) -> RouteModel:
    """As given, or one with which it matters what a system remembers. Raises ConfigError if it would not."""
    system = scenario.system
    remembers = remembers_routes(system) or (
        f"--host-residency {system.host_residency}" if scenario.host_slots else None
    )
    found = find_route_model(given.route_model or (LIKE_TEXT if remembers else "uniform"))
    if remembers and found.memoryless:
        others = ", ".join(name for name, model in ROUTE_MODELS.items() if not model.memoryless)
        raise ConfigError(
            f"--route-model is {given.route_model}, and {remembers} goes by what was chosen before: every expert is "
            f"then as likely as any other, and caches are all alike; give {others}, or a recording (--routes)"
        )
    return found


def _scenario(
    given: SimulateSettings, profile: Profile, recording: Recording | None, prompt_tokens: int, tokens: int
) -> Scenario:
    """The scenario of requests of this length. A given setting comes first, then the given preset, the recording, and
    the default."""
    core = recording.core_config if recording else None
    system = given.preset.config if given.is_given("system") or core is None else core.system
    system = replace(system, **{name: getattr(given, name) for name in CHOSEN if given.is_given(name)})
    check_read(given.model_fields_set, given, system, flag)
    joined = _worker_slots(recording) if recording else {}
    chosen = recording is None or given.is_given("precision") or given.is_given("system")
    forms = None if chosen or recording is None else recorded_form_costs(recording)
    single = given.is_given("system") and given.preset.single_machine
    workers = given.workers or (1 if single else len(joined) or profile.workers)
    slots = _slots(given, system)
    if slots is not None:
        check_slots(workers, slots)
    alignment = core.alignment if core else Alignment()
    scenario = Scenario(
        profile,
        prompt_tokens,
        tokens,
        workers,
        group_size=given.group_size or _group_size(given, core, profile, workers),
        alignment=Alignment(
            given.align_token if given.is_given("align_token") else alignment.token_period,
            given.align_kv if given.is_given("align_kv") else alignment.kv_period,
            given.align_kv_rows if given.is_given("align_kv_rows") else alignment.kv_rows,
            given.align_states if given.is_given("align_states") else alignment.state_period,
        ),
        mini_batch=given.mini_batch if given.is_given("mini_batch") or core is None else core.mini_batch,
        host=profile.host_s is not None and system.placement != "device",
        system=system,
        form_costs=forms,
        requests=given.requests,
        arrivals=tuple(given.interval * number for number in range(given.requests)) if given.interval else (),
        parallel=given.parallel,
        prefill_chunk=given.prefill_chunk,
        batch_dense=_as_recorded(given, recording, "batch_dense") is True,
        draft=_draft(given, recording, system),
        speeds=parse_speeds(given.speeds),
        replicas=given.replicas,
        host_slots=_host_slots(given, profile, recording),
    )
    asked = given.is_given("placement")
    if system.placement != "device" and (asked or needs_host(system)) and not scenario.host:
        by_preset = given.is_given("system") and not asked
        named = f"--system {given.system}" if by_preset else f"--placement {system.placement}"
        raise ConfigError(
            f"{named} needs a host that computes experts, and profile {profile.name} has "
            "no times for one; use a profile with a host, such as rtx3090-pcie3"
        )
    enough = -(-profile.layers * profile.experts // workers) if keeps_all(system) else 1
    return replace(scenario, slots=slots or max([enough, *joined.values()]))


def _as_recorded(given: SimulateSettings, recording: Recording | None, name: str) -> Any:
    """A setting as given, else as in the recorded run, else the default."""
    default = getattr(given, name)
    return default if given.is_given(name) or recording is None else recording.about.get(name, default)


def _draft(given: SimulateSettings, recording: Recording | None, system: SystemConfig) -> Any:
    """Drafts of a block. A run with another source of drafts, or another predictor, says nothing about the shadow's."""
    if given.is_given("draft") or recording is None:
        return given.draft
    from_shadow = recording.about.get("draft_from", SHADOW) == SHADOW and system.predictor == "sep"
    return _as_recorded(given, recording, "draft") if from_shadow else 0


def _slots(given: SimulateSettings, system: SystemConfig) -> int | None:
    """None: the recording's, or those that the residency needs. A simulated worker has memory for two experts."""
    if given.slots == "auto":
        return None if caches(system) else AUTO_SLOTS
    return given.slots if given.is_given("slots") else None


def _host_slots(given: SimulateSettings, profile: Profile, recording: Recording | None) -> int | None:
    """Of each worker. Raises ConfigError for bytes if the size of an expert is not known."""
    if given.host_memory is None or given.host_memory == "auto":
        return None
    if given.host_memory == "0":
        return 0
    experts = profile.layers * profile.experts
    if given.host_memory.strip().endswith("%"):
        return parse_memory(given.host_memory, experts)
    size = recorded_expert_bytes(recording) if recording else (profile.model_sizes or (0,))[0]
    if not size:
        raise ConfigError(
            f"--host-memory is {given.host_memory}, and the size of an expert is not known here; give a share of all "
            "experts, as 25%"
        )
    return min(experts, parse_memory(given.host_memory, 0) // size)


def _preset(given: SimulateSettings, recording: Recording) -> str | None:
    """The preset that is simulated, by name. None: the recording has another one's policies."""
    if given.is_given("system"):
        return given.system
    name = recording.about.get("system")
    return name if name in SYSTEMS else None


def _group_size(given: SimulateSettings, core: CoreConfig | None, profile: Profile, workers: int) -> int | None:
    """The recording's group size, or with --top-k one worker per expert of a token; at most the number of workers.
    None: the profile's."""
    if core is not None:
        return min(core.group_size, workers)
    return min(profile.top_k, workers) if given.is_given("top_k") else None


def _worker_slots(recording: Recording) -> dict[int, int]:
    """Worker -> its slots, without host places."""
    joined = (event for _, event in recording.events if isinstance(event, WorkerJoined))
    return {event.worker: event.slots for event in joined if event.slots}


def _recorded_runs(given: SimulateSettings, file: Path) -> list[Run]:
    """Every recorded request, at the profile's times. Those that were answered together are simulated together, or all
    of them with --parallel. Settings that are not given come from the recording."""
    for name in _OF_ROUTES:
        if given.is_given(name):
            raise ConfigError(f"{flag(name)} is given with --routes; {file} has its own value")
    recording = read_recording(file)
    if recording.foreign and not given.is_given("system"):
        raise ConfigError(
            f"{file} is of a system with {', '.join(recording.foreign)}, which is not here; give --system to simulate "
            "another one on its routes"
        )
    workloads = recorded_workloads(recording)
    if not workloads:
        raise ConfigError(f"recording {file} has no request with a complete prefill; nothing can be simulated")
    profile_name = given.profile if given.is_given("profile") else recording.about.get("profile") or given.profile
    profile = recorded_profile(find_profile(str(profile_name)), recording)
    groups = [workloads] if given.parallel is not None else recorded_groups(workloads)
    known = [right for one in workloads for right in one.drafts.values()]
    for one in workloads:
        one.likely = sum(known) / len(known) if known else one.likely
    return [_recorded_run(given, profile, recording, group, file, drafted=bool(known)) for group in groups]


def _recorded_run(
    given: SimulateSettings,
    profile: Profile,
    recording: Recording,
    group: list[RecordedWorkload],
    file: Path,
    drafted: bool,
) -> Run:
    """Requests that are answered together. Each joins the step that it joined then, unless --parallel is given.
    `drafted`: the file says of some drafts whether they were right."""
    for one in group:
        one.recall, one.acceptance, one.seed = given.recall, given.acceptance, given.seed
    arrivals = _arrivals(given, group, file)
    prompt, tokens = (max(getattr(one, name) for one in arrivals) for name in ("prompt_tokens", "tokens"))
    scenario = _scenario(given, profile, recording, prompt, tokens)
    for one, arrival in zip(group, arrivals, strict=True):
        _check_predictions(replace(scenario, tokens=arrival.tokens), recording, one, file)
    if scenario.draft and scenario.tokens > 1 and given.acceptance is None and not drafted:
        numbers = ", ".join(str(one.number) for one in group)
        raise ConfigError(
            f"--draft is {scenario.draft}, and {file} has no drafts of a shadow for request {numbers}, so nobody knows "
            "how many are right; give --acceptance, or record a run with --draft"
        )
    return Run(scenario, _preset(given, recording), arrivals, group)


def _check_predictions(scenario: Scenario, recording: Recording, one: RecordedWorkload, file: Path) -> None:
    """Check that recorded predictions are used with the alignment that they depend on. Raises ConfigError."""
    if scenario.system.predictor != "sep" or one.recall is not None or scenario.tokens == 1:
        return
    was, simulated = recording.core_config.alignment, scenario.alignment
    if was.kv_rows != simulated.kv_rows:
        raise ConfigError(
            f"--align-kv-rows is {simulated.kv_rows}, and the predictions in {file} are those of a shadow that got "
            f"{was.kv_rows}; leave it out, or give --recall to draw others"
        )
    for label, before, now in (
        ("--align-token", was.token_period, simulated.token_period),
        ("--align-kv", was.kv_period, simulated.kv_period),
    ):
        if before != now:
            raise ConfigError(
                f"{label} is {now}, and the predictions in {file} are those of a shadow aligned every {before}; "
                "leave it out, or give --recall to draw others"
            )
    if not one.predictions:
        raise ConfigError(f"request {one.number} of {file} has no predictions; give --recall, or --predictor none")

"""What `odmoe simulate` does: flags to scenarios, scenarios to figures."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from odmoe.commands.checks import check_writable
from odmoe.commands.simulate_text import show
from odmoe.terminal import Terminal
from scheduler.alignment import Alignment
from scheduler.core.stats import RecallCounts
from scheduler.errors import ConfigError
from scheduler.eventlog.recording import MAX_COUNT, MAX_EXPERTS, Recording, read_recording
from scheduler.eventlog.replay import replay
from scheduler.policies.registry import heeding
from scheduler.policies.systems import preset_of
from scheduler.simulation.recorded_routes import RecordedWorkload, recorded_workloads
from scheduler.simulation.scenario import PROFILE, RECALL, Scenario
from scheduler.simulation.simulate import Outcome, simulate
from scheduler.simulation.time_breakdown import bound_by
from scheduler.simulation.workload import Workload, random_workload
from scheduler.timing.load_budget import luck
from scheduler.timing.profile import Profile, find_profile
from scheduler.trace import write_trace
from scheduler.types import WorkerJoined

_CHOICES = ("predictor", "residency", "prefill", "router", "placement", "precision", "alpha", "prefetch")
_OF_ROUTES = ("prompt_tokens", "layers", "experts", "top_k")
"""What a recording says itself."""
_MOST = {"tokens": MAX_COUNT, "prompt_tokens": MAX_COUNT} | dict.fromkeys(
    ("layers", "experts", "workers", "slots", "top_k"), MAX_EXPERTS
)
"""Beyond that a slip of the keyboard would fill the memory, or run for years."""


@dataclass(frozen=True, slots=True)
class GivenFlags:
    """`flags`: those that were given, by name; `routes`: a recording's file."""

    flags: dict[str, Any]
    routes: Path | None = None

    def get(self, name: str, otherwise: Any) -> Any:
        return self.flags.get(name, otherwise)


@dataclass(frozen=True, slots=True)
class Run:
    """One request to simulate; `measured`: the recorded one."""

    scenario: Scenario
    workload: Workload
    measured: RecordedWorkload | None = None


def run_replay(file: Path, as_json: bool) -> bool:
    """Whether the scheduler decides as it is recorded. Raises ConfigError."""
    done = replay(read_recording(file))
    if as_json:
        facts = {"events": done.events, "commands": done.commands, "difference": done.difference}
        print(json.dumps({"recording": str(file), **facts, "identical": done.difference is None}))
    else:
        print(f"{file}: {done}")
    return done.difference is None


def run_simulation(given: GivenFlags, as_json: bool, terminal: Terminal) -> None:
    """Raises ConfigError."""
    for name, most in _MOST.items():
        if (count := given.get(name, 1)) > most:
            raise ConfigError(f"--{name.replace('_', '-')} is {count}; allowed: 1 to {most}")
    trace = given.get("trace", None)
    if trace is not None:
        check_writable("--trace", str(trace))
    runs = _recorded_runs(given, given.routes) if given.routes is not None else [_random_run(given)]
    began = time.perf_counter()
    outcomes = _simulated(runs, trace is not None, terminal)
    facts = _facts(runs, outcomes, time.perf_counter() - began, given)
    if trace is not None:
        p = facts["profile"]
        shown = {key: value for key, value in facts.items() if key not in ("where_ms", "requests")}
        write_trace(trace, outcomes[0].spans, shown | {"cluster": f"simulated: {p}", "shadow": facts["predictor"]})
    if as_json:
        print(json.dumps(facts))
    else:
        show(facts)


def _simulated(runs: list[Run], spans: bool, terminal: Terminal) -> list[Outcome]:
    """`spans`: kept of the first one."""
    total = sum(run.scenario.tokens for run in runs)
    outcomes: list[Outcome] = []
    before = 0

    def move(count: int) -> None:
        progress("simulated tokens", before + count, total)

    with terminal.progress() as progress:
        for run in runs:
            outcomes.append(simulate(run.scenario, run.workload, spans and not outcomes, move))
            before += run.scenario.tokens
    return outcomes


# --- flags to scenarios -----------------------------------------------------------------------------------------


def _random_run(given: GivenFlags) -> Run:
    profile = find_profile(given.get("profile", PROFILE))
    layers, experts, top_k = (given.get(name, getattr(profile, name)) for name in ("layers", "experts", "top_k"))
    for flag, count in (("--layers", layers), ("--experts", experts), ("--top-k", top_k)):
        if count < 1:
            raise ConfigError(f"{flag} is {count}; allowed: 1, 2, ...")
    profile = replace(profile, layers=layers, experts=experts, top_k=top_k)
    if profile.top_k > profile.experts:
        raise ConfigError(f"--top-k is {profile.top_k} with {profile.experts} experts; allowed: 1 to {profile.experts}")
    scenario = _scenario(given, profile, {}, given.get("prompt_tokens", 16), given.get("tokens", 64))
    recall = given.get("recall", RECALL if scenario.predictor == "sep" else None)
    return Run(scenario, random_workload(scenario, recall, given.get("seed", 0)))


def _scenario(
    given: GivenFlags, profile: Profile, otherwise: dict[str, Any], prompt_tokens: int, tokens: int
) -> Scenario:
    """`otherwise`: what holds where neither a flag nor a system says anything."""
    name = given.get("system", None)
    chosen: dict[str, Any] = {"alignment": (1, 1), "mini_batch": None} | _unsaid("od-moe")
    chosen |= otherwise | (_unsaid(name) if name is not None else {})
    workers = given.get("workers", chosen.get("workers", profile.workers))
    top_k = min(profile.top_k, max(1, workers)) if "top_k" in given.flags else None
    group_size = given.get("group_size", chosen.get("group_size", top_k))
    if "group_size" not in given.flags and group_size is not None:
        group_size = min(group_size, max(1, workers))  # the recording's, on fewer workers
    scenario = Scenario(
        profile, prompt_tokens, tokens, workers, 1, group_size,
        Alignment(given.get("align_token", chosen["alignment"][0]), given.get("align_kv", chosen["alignment"][1])),
        **{choice: given.get(choice, chosen[choice]) for choice in (*_CHOICES, "mini_batch")},
    )  # fmt: skip
    scenario = replace(scenario, host=profile.host_s is not None and scenario.placement != "device")
    for flag, about in (("recall", "predictions"), ("align_token", "token"), ("align_kv", "KV cache")):
        if flag in given.flags and scenario.predictor != "sep":
            profile_name = f"--{flag.replace('_', '-')} is about the shadow's {about}"
            raise ConfigError(f"{profile_name}, and --predictor is {scenario.predictor}: there is no shadow")
    _check_heeded(given, scenario)
    enough = -(-profile.layers * profile.experts // workers) if scenario.residency == "all" else 1
    return replace(scenario, slots=given.get("slots", max(enough, chosen.get("slots", 1))))


def _check_heeded(given: GivenFlags, scenario: Scenario) -> None:
    """Raises ConfigError for a flag without effect."""
    for name, made in (("alpha", (scenario.predictor, scenario.router)), ("prefetch", (scenario.predictor,))):
        if name in given.flags and not set(heeding(name)) & set(made):
            raise ConfigError(
                f"--{name} is {given.flags[name]}, which {' with '.join(made)} does not heed; "
                f"{', '.join(heeding(name))} do: leave it out, or choose one of those"
            )
    if "placement" in given.flags and scenario.placement != "device" and not scenario.host:
        raise ConfigError(
            f"--placement {scenario.placement} needs a second place to compute experts, and profile "
            f"{scenario.profile.name} has no times for a host; take one that has, as rtx3090-pcie3"
        )


def _unsaid(system: str) -> dict[str, Any]:
    """What a system chooses. Raises ConfigError for a name that is none."""
    return dict.fromkeys(_CHOICES) | preset_of(system).values()


def _recorded_runs(given: GivenFlags, file: Path) -> list[Run]:
    """Every recorded request, on the profile's timings, with the recording's own choices but for what was said."""
    for name in _OF_ROUTES:
        if name in given.flags:
            raise ConfigError(f"--{name.replace('_', '-')} is given with --routes; {file} says that itself")
    recording = read_recording(file)
    workloads = recorded_workloads(recording)
    if not workloads:
        raise ConfigError(f"recording {file} has no request whose prefill is whole; nothing can be simulated")
    profile_name = given.get("profile", recording.about.get("profile") or PROFILE)
    shape = recording.choices.shape
    profile = replace(
        find_profile(str(profile_name)), layers=len(shape.layers), experts=shape.experts, top_k=shape.top_k
    )
    otherwise = _recorded_choices(recording)
    runs = []
    for one in workloads:
        one.recall, one.seed = given.get("recall", None), given.get("seed", 0)
        tokens = given.get("tokens", one.tokens)
        if tokens > one.tokens:
            raise ConfigError(
                f"--tokens is {tokens}; allowed: 1 to {one.tokens}, as request {one.number} of {file} has"
            )
        scenario = _scenario(given, profile, otherwise, one.prompt_tokens, tokens)
        _check_predictions(scenario, recording, one, file)
        runs.append(Run(scenario, one, one))
    return runs


def _recorded_choices(recording: Recording) -> dict[str, Any]:
    joined = {
        event.worker: event.slots for _, event in recording.events if isinstance(event, WorkerJoined) and event.slots
    }
    choices = recording.choices
    return {
        "workers": len(joined), "slots": max(joined.values(), default=1), "group_size": choices.group_size,
        "alignment": (choices.alignment.token_period, choices.alignment.kv_period),
        "mini_batch": choices.mini_batch, **{name: getattr(choices, name) for name in _CHOICES},
    }  # fmt: skip


def _check_predictions(scenario: Scenario, recording: Recording, one: RecordedWorkload, file: Path) -> None:
    """What a shadow said depends on how it was aligned. Raises ConfigError."""
    if scenario.predictor != "sep" or one.recall is not None or scenario.tokens == 1:
        return
    was, simulated = recording.choices.alignment, scenario.alignment
    for flag, before, now in (
        ("--align-token", was.token_period, simulated.token_period),
        ("--align-kv", was.kv_period, simulated.kv_period),
    ):
        if before != now:
            raise ConfigError(
                f"{flag} is {now}, and the predictions in {file} are those of a shadow aligned every {before}; "
                "leave it out, or give --recall to draw others"
            )
    if not one.predictions:
        raise ConfigError(f"request {one.number} of {file} has no predictions; give --recall, or --predictor none")


# --- outcomes to figures ----------------------------------------------------------------------------------------


def _facts(runs: list[Run], outcomes: list[Outcome], took_s: float, given: GivenFlags) -> dict[str, Any]:
    """What --json prints: means over requests, each token counting alike."""
    scenario, p = runs[0].scenario, runs[0].scenario.profile
    decoded = sum(len(outcome.token_s) for outcome in outcomes)
    ends = [outcome.token_s[-1] if outcome.token_s else outcome.ttft_s for outcome in outcomes]
    decode_s = sum(end - outcome.ttft_s for end, outcome in zip(ends, outcomes, strict=True))
    where = {
        cause: sum(outcome.where[cause] * len(outcome.token_s) for outcome in outcomes) / max(1, decoded)
        for cause in outcomes[0].where
    }
    tallies = [outcome.stats.overall for outcome in outcomes]
    recall = RecallCounts(sum(counts.correct for counts in tallies), sum(counts.activated for counts in tallies)).recall
    tokens = decoded + len(outcomes)
    return {
        "profile": p.name, "model": {"layers": p.layers, "experts": p.experts, "top_k": p.top_k},
        "workers": scenario.worker_count, "slots": scenario.slots, "group_size": scenario.group,
        **{name: getattr(scenario, name) for name in _CHOICES}, "host": scenario.host,
        "align_token": scenario.alignment.token_period, "align_kv": scenario.alignment.kv_period,
        "mini_batch": scenario.mini_batch, "seed": given.get("seed", 0),
        "prompt_tokens": [run.scenario.prompt_tokens for run in runs],
        "tokens": [run.scenario.tokens for run in runs],
        "ttft_s": sum(outcome.ttft_s for outcome in outcomes) / len(outcomes),
        "decode_tokens_per_s": decoded / decode_s if decoded else None,
        "luck": luck(outcomes[0].ttft_s, outcomes[0].token_s) if given.routes is None else None,
        "tokens_per_s": tokens / sum(ends),
        "loads_a_token": sum(outcome.stats.decode_loads for outcome in outcomes) / decoded if decoded else None,
        "reloads_a_token": sum(outcome.stats.reloads for outcome in outcomes) / decoded if decoded else None,
        "recall": recall, "where_ms": {cause: seconds * 1e3 for cause, seconds in where.items()},
        "bound": bound_by(where) if decoded else None,
        "requests": [_beside(run, outcome) for run, outcome in zip(runs, outcomes, strict=True)],
        "trace": str(given.get("trace", "")) or None,
        "events": sum(outcome.events for outcome in outcomes), "wall_s": took_s,
        "simulated_tokens_per_s": tokens / took_s,
    }  # fmt: skip


def _beside(run: Run, outcome: Outcome) -> dict[str, Any]:
    """One request, and what its recording measured."""
    facts = {"ttft_s": outcome.ttft_s, "decode_tokens_per_s": outcome.decode_tokens_per_s}
    if run.measured is not None:
        was = run.measured
        facts |= {"recorded_ttft_s": was.ttft_s, "recorded_decode_tokens_per_s": was.decode_tokens_per_s}
    return facts

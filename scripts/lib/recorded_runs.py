"""What experiments share that simulate a real model's routes: recordings of it, and simulations of them.

Routes and predictions do not depend on time: a shadow waits for every alignment that is due, and between them it goes
by its own tokens. So they are recorded once, without emulation, from the smallest cluster, and simulated under any
profile and with any number of workers. An emulated run is compared with what is simulated of its own recording.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from main_node.shape import model_shape
from odmoe.settings.settings import Settings
from scheduler.drafts.length import DraftLengths
from scheduler.eventlog.recording import Recording, read_recording
from scheduler.files import write_whole
from scheduler.simulation.recorded_forms import recorded_form_costs, recorded_profile
from scheduler.simulation.recorded_routes import RecordedWorkload, recorded_groups, recorded_workloads
from scheduler.simulation.requests import Arrival
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.simulate import Outcome, simulate, simulate_requests
from scheduler.timing.profile import Profile, find_profile
from scheduler.types import ModelShape, StepStarted, WorkerJoined, WorkerLost
from scripts.lib.clusters import KeptCluster, predicted

NEEDED: dict[str, Any] = {"workers": 1, "slots": 4, "loader": "memory"}
"""The fastest cluster for one process."""
TOGETHER = "together"
"""In place of the way of prefill, if several prompts are asked at once: their decode time is compared."""
IDLE_S = 1e4
"""Between requests that are simulated one after the other: longer than any answer."""
TOKENS_PER_S = 8.0
"""Guess of a first estimate."""


def fitted(profile: str, store: Any) -> Profile:
    """A profile's times for this model's layers, experts and top-k. Raises ConfigError."""
    return of_shape(find_profile(profile), model_shape(store))


def of_shape(profile: Profile, shape: ModelShape) -> Profile:
    return replace(profile, layers=len(shape.layers), experts=shape.experts, top_k=shape.top_k)


def record(kept: KeptCluster, settings: Settings, prompts: list[list[int]], tokens: int, path: Path) -> dict[str, Any]:
    """Every prompt answered by a new cluster; its recording at `path`."""
    cluster = kept.cluster(settings.replace(record=str(path), **NEEDED))
    reports = [predicted(cluster, prompt, tokens) for prompt in prompts]
    write_whole(path, cluster.recording())
    kept.close()  # a recording has all that its cluster ever answered
    return {"recall": [report.recall for report in reports], "bytes": path.stat().st_size}


def requests(path: Path, prompts: list[list[int]], tokens: int) -> list[RecordedWorkload]:
    """What was recorded of each prompt. SystemExit if the file is of other prompts, or lacks predictions."""
    recording = read_recording(path)
    found = recorded_workloads(recording)
    lengths = [(one.prompt_tokens, one.tokens) for one in found]
    if lengths != [(len(prompt), tokens) for prompt in prompts]:
        raise SystemExit(f"{path} holds {lengths} tokens of prompts and answers; --fresh makes it again")
    core = recording.core_config
    wanted = (tokens - 1) * len(core.shape.layers) if core.system.predictor == "sep" else 0
    if any(len(one.predictions) < wanted for one in found):
        raise SystemExit(f"{path} lacks predictions of its shadow; --fresh makes it again")
    return found


def simulated(profile: Profile, of: RecordedWorkload, **fields: Any) -> Outcome:
    """`fields`: of the `scheduler.simulation.scenario.Scenario`."""
    return simulate(Scenario(profile, prompt_tokens=of.prompt_tokens, tokens=of.tokens, **fields), of)


# --- emulated runs beside simulated ones -----------------------------------------------------------------------------


def compare(
    recording: Recording, prompts: list[tuple[list[int], int]], times: list[Any], profile: str, draft: int | str = 0
) -> list[dict[str, Any]]:
    """Each prompt but the warm-up, as measured and as simulated. The last requests of a recording are ours. SystemExit
    if somebody else has asked meanwhile."""
    found = recorded_workloads(recording)[-len(times) :]
    was, wanted = [(one.prompt_tokens, one.tokens) for one in found], [(len(ids), tokens) for ids, tokens in prompts]
    if was != wanted:
        raise SystemExit(
            f"recorded were prompts and answers of {was} tokens, asked {wanted}; did others ask meanwhile?"
        )
    scenario = scenario_of(recording, profile, draft=draft)
    lengths = scenario.draft_lengths()
    rows = [
        _compare(recording, replace(scenario, tokens=one.tokens), one, ttft_s, decode_s, lengths)
        for one, (ttft_s, decode_s) in zip(found, times, strict=True)
    ]
    return rows[1:]


def compare_in_turn(recording: Recording, times: list[Any], profile: str) -> list[dict[str, Any]]:
    """All recorded requests, as measured and as simulated: one after the other, with what the cluster keeps. `times`:
    (TTFT, decode seconds) of each. SystemExit if others were recorded, too."""
    found = recorded_workloads(recording)
    if len(found) != len(times):
        raise SystemExit(f"{len(times)} prompts were asked, {len(found)} recorded; did others ask meanwhile?")
    arrivals = [Arrival(one, one.prompt_tokens, one.tokens, at=IDLE_S * number) for number, one in enumerate(found)]
    outcome = simulate_requests(scenario_of(recording, profile), arrivals)
    return [
        {
            "prompt_tokens": one.prompt_tokens,
            "tokens": one.tokens,
            "ttft_s": ttft_s,
            "simulated_ttft_s": found.ttft_s,
            "token_s": decode_s / (one.tokens - 1),
            "simulated_token_s": (found.token_s[-1] - found.ttft_s) / len(found.token_s),
        }
        for one, found, (ttft_s, decode_s) in zip(arrivals, outcome.answers, times, strict=True)
    ]


def compare_together(
    recording: Recording, times: list[Any], tokens: int, profile: str, batch_dense: bool = False, draft: int | str = 0
) -> list[dict[str, Any]]:
    """Requests that were answered together, as measured and as simulated. SystemExit if they were not."""
    *before, group = recorded_groups(recorded_workloads(recording))
    if (found := [one.tokens for one in group]) != [tokens] * len(times):
        raise SystemExit(
            f"{len(times)} prompts were asked at once for {tokens} tokens each, and those answered together have "
            f"{found}; did others ask meanwhile?"
        )
    scenario = scenario_of(recording, profile, requests=len(group), batch_dense=batch_dense, draft=draft)
    lengths = scenario.draft_lengths()
    for of in [*before, group]:
        arrivals = [Arrival(one, one.prompt_tokens, one.tokens, step=one.step) for one in of]
        outcome = simulate_requests(replace(scenario, requests=len(of)), arrivals, lengths=lengths)
    simulated = sorted((one.token_s[-1] - one.ttft_s) / (tokens - 1) for one in outcome.answers)
    measured = sorted(decode_s / (tokens - 1) for _, decode_s in times)  # threads are not in the requests' order
    recalls = [one.stats.overall for one in outcome.answers]
    shared = {
        "prompt_tokens": group[0].prompt_tokens,
        "tokens": tokens,
        "prefill": TOGETHER,
        "recall": sum(counts.correct for counts in recalls) / max(1, sum(counts.activated for counts in recalls)),
        **(_blocks(recording, group, outcome) if draft else {}),
    }
    return [
        {**shared, "unpredicted": one.stats.unpredicted, "token_s": was, "simulated_token_s": now}
        for one, was, now in zip(outcome.answers, measured, simulated, strict=True)
    ]


def scenario_of(recording: Recording, profile: str, **fields: Any) -> Scenario:
    """The recording's configuration and the model's shape, at a profile's times."""
    made = recording.core_config
    return Scenario(
        recorded_profile(find_profile(profile), recording),
        alignment=made.alignment,
        system=made.system,
        mini_batch=made.mini_batch,
        group_size=made.group_size,
        form_costs=recorded_form_costs(recording),
        **fields,
        **joined(recording),
    )


def _compare(
    recording: Recording,
    scenario: Scenario,
    one: RecordedWorkload,
    ttft_s: float,
    decode_s: float | None,
    lengths: DraftLengths,
) -> dict[str, Any]:
    """One request as measured and as simulated. `lengths`: of drafts, as the requests before it have left them."""
    arrival = Arrival(one, one.prompt_tokens, one.tokens)
    outcome = simulate_requests(scenario, [arrival], lengths=lengths)
    made = recording.core_config
    row = {"prompt_tokens": one.prompt_tokens, "tokens": one.tokens, "prefill": made.system.prefill}
    row |= {"ttft_s": ttft_s, "simulated_ttft_s": outcome.ttft_s, "recall": outcome.stats.overall.recall}
    row["unpredicted"] = outcome.stats.unpredicted
    if decode_s is not None:
        simulated = (outcome.token_s[-1] - outcome.ttft_s) / len(outcome.token_s)
        row |= {"token_s": decode_s / (one.tokens - 1), "simulated_token_s": simulated}
        row |= _blocks(recording, [one], outcome) if scenario.draft else {}
    return row


def _blocks(recording: Recording, group: list[RecordedWorkload], outcome: Outcome) -> dict[str, float]:
    """Rows and tokens of a pass that decodes, of these requests together, as recorded and as simulated."""
    numbers = {one.number for one in group}
    steps = [event.passes for _, event in recording.events if isinstance(event, StepStarted)]
    rows = [one.tokens for of in steps for one in of if one.request in numbers and not one.prefill]
    gained, (blocks, now, gives) = sum(one.tokens - 1 for one in group), outcome.drafted
    found = {"rows": sum(rows) / len(rows), "simulated_rows": now / blocks}
    return found | {"tokens_a_pass": gained / len(rows), "simulated_tokens_a_pass": gives / blocks}


def joined(recording: Recording) -> dict[str, Any]:
    """How many workers there were, the slots of each, and whether there was a host place. SystemExit if they
    changed, or differ."""
    every = [event for _, event in recording.events if isinstance(event, WorkerJoined)]
    came = [event for event in every if event.slots]
    lost = sum(isinstance(event, WorkerLost) for _, event in recording.events)
    slots = {event.slots for event in came}
    if lost or len({event.worker for event in came}) != len(came) or len(slots) != 1:
        raise SystemExit(
            f"{lost} workers were lost, {len(came)} came, with {sorted(slots)} slots: nothing to compare; "
            "bring all up anew"
        )
    return {"workers": len(came), "slots": slots.pop(), "host": len(came) < len(every)}

"""Time to first token on a virtual clock: recorded routes and foresight, at the times of a profile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from odmoe.settings.settings import Settings
from scheduler.eventlog.recording import Recording, read_recording
from scheduler.files import write_whole
from scheduler.policies.predictors.base import Foresight
from scheduler.policies.system_config import SystemConfig
from scheduler.simulation.recorded_routes import RecordedWorkload, recorded_workloads
from scheduler.simulation.requests import Arrival
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.simulate import simulate_requests
from scheduler.timing.profile import Profile
from scheduler.trace import Span
from scripts.lib.clusters import KeptCluster, answer
from scripts.lib.recorded_runs import IDLE_S, of_shape

PREDICTOR = "stacked"
"""What is recorded with: it reads the gates of several next layers, and the next one's is among them."""
SILENT = ("token", "attention")
"""What predictors read that expect nothing in prefill: systems are simulated without them."""
SCORED = "mrs"
"""A residency that reads the scores of gates, so that they are recorded for whoever reads them."""
DEVICE, HOST = "worker 0", "worker 1"
"""The host place joins after the only worker."""
KINDS = {
    (DEVICE, "load"): "link_busy",
    (DEVICE, "given up"): "link_busy",
    (DEVICE, "compute"): "device_busy",
    (HOST, "compute"): "host_busy",
}


def in_prefill(system: SystemConfig, foresight: Foresight | None) -> SystemConfig:
    """The system less a predictor that expects nothing in prefill."""
    return replace(system, predictor="none") if foresight in SILENT else system


def record(kept: KeptCluster, model: str, prompts: list[list[int]], tokens: int, path: Path) -> dict[str, Any]:
    """All prompts answered one after the other by a new cluster, natively, from memory and in full precision, so that
    routes are the model's own; its recording at `path`."""
    settings = Settings(
        model=model,
        dtype="float32",
        predictor=PREDICTOR,
        residency=SCORED,
        prefill="pipelined",
        workers=1,
        slots=32,
        loader="memory",
        record=str(path),
    )
    cluster = kept.cluster(settings)
    for prompt in prompts:
        answer(cluster, prompt, tokens)
    write_whole(path, cluster.recording())
    kept.close()  # a recording has all that its cluster ever answered
    return {"bytes": path.stat().st_size}


def read(path: Path) -> tuple[Recording, list[RecordedWorkload]]:
    """A recording, and its requests in their order."""
    recording = read_recording(path)
    return recording, recorded_workloads(recording)


def foreseeing(one: RecordedWorkload, foresight: Foresight | None) -> RecordedWorkload:
    """The request as recorded, for a predictor that reads one next gate, or several."""
    if foresight != "gate":
        return one
    gates = {
        (index, layer): gate._replace(foreseen=tuple(of for of in gate.foreseen if of[:2] == (index, layer + 1)))
        for (index, layer), gate in one.gates.items()
    }
    return replace(one, foresight=foresight, gates=gates)


def scenario_of(profile: Profile, system: SystemConfig, budget: int) -> Scenario:
    """One worker with slots for `budget` % of the experts in full precision, and a host place."""
    scenario = Scenario(profile, workers=1, system=system, host=True)
    form = scenario.largest_form(scenario.costs_of(0))
    room = profile.layers * profile.experts * budget / 100
    return replace(scenario, slots=int(room / profile.form_share(form) + 1e-9))


def figures(
    recorded: tuple[Recording, list[RecordedWorkload]],
    profile: Profile,
    system: SystemConfig,
    foresight: Foresight | None,
    budget: int,
) -> list[dict[str, Any]]:
    """Of each request, in their order and with what the cluster keeps: seconds to the first token, and until then
    loads, experts computed on the host, and how busy link, device and host were."""
    recording, found = recorded
    fitted = of_shape(profile, recording.core_config.shape)  # whose experts decide how small their forms are
    scenario = scenario_of(fitted, in_prefill(system, foresight), budget)
    arrivals = [
        Arrival(foreseeing(one, foresight), one.prompt_tokens, one.tokens, IDLE_S * n) for n, one in enumerate(found)
    ]
    outcome = simulate_requests(scenario, arrivals, spans=True)
    return [
        {
            "prompt_tokens": arrival.prompt_tokens,
            "ttft_s": one.ttft_s,
            "loads": one.stats.loads - one.stats.decode_loads,
            "hosted": one.stats.host_calls - one.stats.decode_host_calls,
            **busy(outcome.spans, arrival.at, arrival.at + one.ttft_s),
        }
        for arrival, one in zip(arrivals, outcome.answers, strict=True)
    ]


def busy(spans: Iterable[Span], begin: float, end: float) -> dict[str, float]:
    """The share of the time from `begin` to `end` in which the link loads, and device and host compute."""
    shares = dict.fromkeys(KINDS.values(), 0.0)
    for span in spans:
        kind = KINDS.get((span.row, span.what))
        if kind is not None and span.start < end and span.end > begin:
            shares[kind] += (min(span.end, end) - max(span.start, begin)) / (end - begin)
    return shares

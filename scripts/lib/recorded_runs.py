"""What experiments share that simulate a real model's routes: recordings of it, and simulations of them.

Routes and predictions do not depend on time: a shadow waits for every alignment that is due, and between them it goes
by its own tokens. So they are recorded once, without emulation, from the smallest cluster, and simulated under any
profile and with any number of workers.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from main_node.shape import model_shape
from odmoe.settings.settings import Settings
from scheduler.eventlog.recording import read_recording
from scheduler.files import write_whole
from scheduler.simulation.recorded_routes import RecordedWorkload, recorded_workloads
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.simulate import Outcome, simulate
from scheduler.timing.profile import Profile, find_profile
from scheduler.types import ModelShape
from scripts.lib.clusters import KeptCluster, predicted

NEEDED: dict[str, Any] = {"workers": 1, "slots": 4, "loader": "memory"}
"""The fastest cluster for one process."""
TOKENS_PER_S = 8.0
"""Guess of a first estimate."""


def fitted(profile: str, store: Any) -> Profile:
    """A profile's times for this model's layers, experts and top-k. Raises ConfigError."""
    return of_shape(find_profile(profile), model_shape(store))


def of_shape(profile: Profile, shape: ModelShape) -> Profile:
    return dataclasses.replace(profile, layers=len(shape.layers), experts=shape.experts, top_k=shape.top_k)


def record(kept: KeptCluster, settings: Settings, prompts: list[list[int]], tokens: int, path: Path) -> dict[str, Any]:
    """Every prompt answered by a new cluster; its recording at `path`."""
    cluster = kept.cluster(settings.but(record=str(path), **NEEDED))
    reports = [predicted(cluster, prompt, tokens) for prompt in prompts]
    write_whole(path, cluster.recording())
    kept.close()  # a recording has all that its cluster ever answered
    return {"recall": [report.recall for report in reports], "bytes": path.stat().st_size}


def requests(path: Path, prompts: list[list[int]], tokens: int) -> list[RecordedWorkload]:
    """What was recorded of each prompt. SystemExit where the file is of other prompts, or lacks predictions."""
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

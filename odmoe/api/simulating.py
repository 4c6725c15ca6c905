"""`odmoe.simulate`: a system's scheduler on a virtual clock, and `odmoe.replay`: a recording's decisions again."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from odmoe.api.checks import check_writable
from odmoe.api.names import named_as_keywords, path_of, table_of
from odmoe.api.simulation.figures import Simulation, figures_of
from odmoe.api.simulation.scenarios import Run, runs_of
from odmoe.settings.simulate_settings import SimulateSettings
from scheduler.errors import ConfigError
from scheduler.eventlog.recording import read_recording
from scheduler.eventlog.replay import Replayed
from scheduler.eventlog.replay import replay as replay_recording
from scheduler.policies.policy_file import load_policy_file
from scheduler.simulation.simulate import Outcome, simulate_requests
from scheduler.trace import write_trace

if TYPE_CHECKING:
    from odmoe.settings.keywords import SimulateKeywords

Move = Callable[[str, int, int], None]
"""Gets the progress: a task, what is done of it, and all of it."""
Progress = Callable[[], contextlib.AbstractContextManager[Move]]


def simulate(**settings: Unpack[SimulateKeywords]) -> Simulation:
    """The speed of a system, and where the time goes. No model is needed.

    `settings`: those of `odmoe simulate --help`, with underscores. Raises ConfigError.
    """
    if "replay" in settings:  # no keyword for a type checker
        raise ConfigError("replay is a setting of the command line; call odmoe.replay(file)")
    with named_as_keywords():
        return run_simulation(table_of(SimulateSettings, settings, "a setting of odmoe simulate"))


def replay(
    recording: str | os.PathLike[str], validate: bool = False, policy_file: str | os.PathLike[str] | None = None
) -> Replayed:
    """Compare the scheduler's decisions with those of a recording (`record=FILE`): its `difference` is None if they are
    the same. `validate`: check the scheduler's books after each event, too. `policy_file`: has policies of the
    recording. Raises ConfigError."""
    if policy_file is not None:
        load_policy_file(path_of("policy_file", policy_file, "a Python file"), "policy_file")
    path = Path(path_of("recording", recording, "a file that record=FILE has written"))
    return replay_recording(read_recording(path), validate)


def run_simulation(given: SimulateSettings, progress: Progress = lambda: contextlib.nullcontext(_silent)) -> Simulation:
    """`progress`: begins to show the progress. Writes the trace that is asked for. Raises ConfigError."""
    if given.trace is not None:
        check_writable("--trace", given.trace)
    runs = runs_of(given)
    began = time.perf_counter()
    outcomes = _outcomes(runs, given.trace is not None, progress)
    found = figures_of(runs, outcomes, time.perf_counter() - began, given)
    if given.trace is not None:
        facts = found.as_dict()
        shown = {key: value for key, value in facts.items() if key not in ("where_ms", "requests", "token_gap_s")}
        about = {"cluster": f"simulated: {found.profile}", "shadow": facts["predictor"]}
        write_trace(Path(given.trace), outcomes[0].spans, shown | about)
    return found


def _silent(task: str, done: int, total: int) -> None:
    """Shows nothing."""


def _outcomes(runs: list[Run], spans: bool, progress: Progress) -> list[Outcome]:
    """`spans`: whether to keep the spans of the first run. What rows of drafts cost in a run is known in the next."""
    counts = [sum(arrival.tokens for arrival in run.arrivals) for run in runs]
    outcomes: list[Outcome] = []
    before, lengths = 0, runs[0].scenario.draft_lengths()

    with progress() as show:

        def move(count: int) -> None:
            show("simulated tokens", before + count, sum(counts))

        for run, count in zip(runs, counts, strict=True):
            outcomes.append(simulate_requests(run.scenario, run.arrivals, spans and not outcomes, move, lengths, True))
            before += count
    return outcomes

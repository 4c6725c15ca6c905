"""What a cluster's recording says of its workers is what is simulated."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from scheduler.build import make_core
from scheduler.eventlog.recording import Recorder, Recording, read_recording
from scheduler.policies.system_config import CoreConfig
from scheduler.simulation.requests import random_arrivals
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.world import World
from scheduler.timing.profile import find_profile
from scheduler.types import Event, ModelShape, RequestOpened, WorkerJoined, WorkerLost
from scripts.lib import recorded_runs
from scripts.measure.agreement import __main__ as agreement


def recording(*events: Event) -> Recording:
    about: dict[str, Any] = {"workers": 8, "slots": 1}  # as the settings of hosts say that nobody has counted
    return Recording(
        about, CoreConfig(ModelShape((0,), 4, 2), 2), [(0.0, event) for event in events], [[] for _ in events]
    )


def test_as_many_workers_as_came() -> None:
    came = recording(*(WorkerJoined(number, 2) for number in range(5)), RequestOpened(1, 4))
    assert recorded_runs.joined(came) == {"workers": 5, "slots": 2, "host": False}


def test_a_host_place_is_no_worker() -> None:
    came = recording(WorkerJoined(0, 7), WorkerJoined(1, 0), RequestOpened(1, 4))
    assert recorded_runs.joined(came) == {"workers": 1, "slots": 7, "host": True}


@pytest.mark.parametrize(
    "events",
    [
        (WorkerJoined(0, 1), WorkerJoined(1, 2)),
        (WorkerJoined(0, 1), WorkerJoined(1, 1), WorkerLost(1, "gone"), WorkerJoined(1, 1)),
        (RequestOpened(1, 4),),
    ],
)
def test_workers_that_differ_or_were_lost_are_not_compared(events: tuple[Event, ...]) -> None:
    with pytest.raises(SystemExit, match="nothing to compare"):
        recorded_runs.joined(recording(*events))


def answered(file: Path, scenario: Scenario, same_token: float = 1.0) -> tuple[Recording, list[Any]]:
    """The simulator's own recording, and (TTFT, decode seconds) of each request, from its arrival."""
    core, recorder = make_core(scenario.core_config), Recorder({}, scenario.core_config)
    decide = core.handle

    def handle(event: Event, now: float) -> Any:
        commands = decide(event, now)
        recorder.on_handled(event, now, commands)
        return commands

    core.handle = handle  # type: ignore[method-assign]
    world = World(core, scenario, random_arrivals(scenario, 1.0, same_token=same_token))
    world.start()
    assert world.run(scenario.requests * scenario.tokens)
    world.drain()
    file.write_bytes(recorder.take())
    requests = world.queue.requests
    return read_recording(file), [(one.done[0], one.done[-1] - one.done[0]) for one in requests]


def test_requests_that_were_answered_together_are_compared(tmp_path: Path) -> None:
    """Against the simulator's own recording: what it simulates once more takes as long."""
    scenario = Scenario(find_profile("rtx3090-1gbe"), tokens=4, requests=3)
    recording, times = answered(tmp_path / "log", scenario)
    rows = recorded_runs.compare_together(recording, times, 4, "rtx3090-1gbe")
    assert [row["token_s"] for row in rows] == pytest.approx([row["simulated_token_s"] for row in rows], rel=0.02)
    assert rows[0]["recall"] == 1.0
    [summed] = agreement.summary([{"answers": rows}])
    assert summed["ratio"] == pytest.approx(1.0, rel=0.02)
    assert summed["paper_s"] is None
    with pytest.raises(SystemExit, match="3 prompts were asked at once for 5 tokens each"):
        recorded_runs.compare_together(recording, times, 5, "rtx3090-1gbe")


@pytest.mark.slow
@pytest.mark.parametrize("batch_dense", [False, True])
@pytest.mark.parametrize("draft", [3, "auto"])
def test_drafts_of_several_requests_are_compared(tmp_path: Path, draft: int | str, batch_dense: bool) -> None:
    scenario = Scenario(find_profile("rtx3090-1gbe"), tokens=16, requests=2, draft=draft, batch_dense=batch_dense)
    recording, times = answered(tmp_path / "log", scenario)
    rows = recorded_runs.compare_together(recording, times, 16, "rtx3090-1gbe", batch_dense, draft)
    assert [row["token_s"] for row in rows] == pytest.approx(sorted(row["simulated_token_s"] for row in rows))
    assert rows[0]["rows"] == rows[0]["simulated_rows"] > 1
    assert rows[0]["tokens_a_pass"] == rows[0]["simulated_tokens_a_pass"] > 1
    result = {"answers": rows, "profile": "rtx3090-1gbe", "difference": None}
    asked = argparse.Namespace(
        cluster="local", shadow="fp16", departure="late", requests=2, draft=draft, batch_dense=batch_dense
    )
    [row] = agreement.described(agreement.summary([result]), [result], asked)
    assert row["ratio"] == pytest.approx(1.0)
    assert row["rows"] == row["simulated_rows"] == pytest.approx(rows[0]["rows"])
    assert (row["draft"], row["replayed"]) == (str(draft), "identical")
    assert agreement.COLUMNS[0].text(row) == "local, fp16, late, 2 requests"


@pytest.mark.slow
def test_drafts_of_requests_one_by_one_are_compared(tmp_path: Path) -> None:
    """What the warm-up has shown of the cost of rows is known to the request after it, measured and simulated."""
    scenario = Scenario(find_profile("rtx3090-1gbe"), tokens=24, requests=2, parallel=1, draft="auto")
    recording, times = answered(tmp_path / "log", scenario)
    prompts = [([0] * scenario.prompt_tokens, 24)] * 2
    [row] = recorded_runs.compare(recording, prompts, times, "rtx3090-1gbe", "auto")
    assert row["token_s"] == pytest.approx(row["simulated_token_s"], rel=1e-6)
    assert (row["rows"], row["tokens_a_pass"]) == (row["simulated_rows"], row["simulated_tokens_a_pass"])
    [few] = recorded_runs.compare(recording, prompts, times, "rtx3090-1gbe", 3)
    assert few["simulated_rows"] <= 4 < row["rows"]


def test_without_drafts_no_rows_are_told(tmp_path: Path) -> None:
    scenario = Scenario(find_profile("rtx3090-1gbe"), tokens=4, requests=2, parallel=1)
    recording, times = answered(tmp_path / "log", scenario)
    [row] = recorded_runs.compare(recording, [([0] * scenario.prompt_tokens, 4)] * 2, times, "rtx3090-1gbe")
    assert "rows" not in row

"""What a cluster's recording says of its workers is what is simulated."""

from __future__ import annotations

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
from scripts.measure import agreement


def recording(*events: Event) -> Recording:
    about: dict[str, Any] = {"workers": 8, "slots": 1}  # as the settings of hosts say that nobody has counted
    return Recording(
        about, CoreConfig(ModelShape((0,), 4, 2), 2), [(0.0, event) for event in events], [[] for _ in events]
    )


def test_as_many_workers_as_came() -> None:
    came = recording(*(WorkerJoined(number, 2) for number in range(5)), RequestOpened(1, 4))
    assert agreement.joined(came) == {"workers": 5, "slots": 2}


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
        agreement.joined(recording(*events))


def test_requests_that_were_answered_together_are_compared(tmp_path: Path) -> None:
    """Against the simulator's own recording: what it simulates once more takes as long."""
    scenario = Scenario(find_profile("rtx3090-1gbe"), tokens=4, requests=3)
    core, recorder = make_core(scenario.core_config), Recorder({}, scenario.core_config)
    decide = core.handle

    def handle(event: Event, now: float) -> Any:
        commands = decide(event, now)
        recorder.keep(event, now, commands)
        return commands

    core.handle = handle  # type: ignore[method-assign]
    world = World(core, scenario, random_arrivals(scenario, 1.0, same_token=1.0))
    world.start()
    assert world.run(12)
    world.drain()
    file = tmp_path / "log"
    file.write_bytes(recorder.take())
    times = [(one.done[0], one.done[-1] - one.done[0]) for one in world.queue.requests]
    rows = agreement.compare_together(read_recording(file), times, 4, "rtx3090-1gbe")
    assert [row["token_s"] for row in rows] == pytest.approx([row["simulated_token_s"] for row in rows], rel=0.02)
    assert rows[0]["recall"] == 1.0
    [summed] = agreement.summary([{"answers": rows}])
    assert summed["ratio"] == pytest.approx(1.0, rel=0.02)
    assert summed["paper_s"] is None
    with pytest.raises(SystemExit, match="3 prompts were asked at once for 5 tokens each"):
        agreement.compare_together(read_recording(file), times, 5, "rtx3090-1gbe")

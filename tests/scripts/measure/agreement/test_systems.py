"""Every system is compared, with what its cluster keeps from one prompt to the next."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from scheduler.build import make_core
from scheduler.eventlog.recording import Recorder, Recording, read_recording
from scheduler.policies.registry import caches
from scheduler.policies.system_config import SystemConfig
from scheduler.policies.systems import SYSTEMS
from scheduler.simulation.requests import random_arrivals
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.world import World
from scheduler.timing.profile import find_profile
from scripts.lib import recorded_runs
from scripts.measure.agreement import systems as agreement_systems

FLAGS = argparse.Namespace(
    profile="rtx3090-1gbe",
    pc="rtx3090-pcie3@8",
    device_memory="25%",
    shadow="int8",
    prompts=1,
    prompt_tokens=16,
    tokens=8,
    seed=0,
)


@pytest.mark.parametrize("name", SYSTEMS)
def test_each_system_has_a_cell(name: str) -> None:
    config = SYSTEMS[name].config
    found = agreement_systems.params_of(name, FLAGS)
    assert found["profile"] == ("rtx3090-pcie3@8" if SYSTEMS[name].single_machine else "rtx3090-1gbe")
    assert (found["device_memory"] is not None) == (caches(config) and config.residency != "all")
    settings = agreement_systems.settings_of(found, argparse.Namespace(model="models/deep-moe"), "log")
    assert settings.system_config == config
    assert settings.record == "log"


def recorded(file: Path) -> tuple[Recording, list[tuple[float, float]]]:
    """Two requests, the second long after the first has ended, on a worker that keeps experts."""
    profile, system = find_profile("rtx3090-pcie3"), SystemConfig("none", "lru")
    scenario = Scenario(profile, tokens=4, slots=200, requests=2, arrivals=(0.0, 1000.0), system=system)
    core, recorder = make_core(scenario.core_config), Recorder({}, scenario.core_config)
    decide = core.handle

    def handle(event: object, now: float) -> object:
        commands = decide(event, now)  # type: ignore[arg-type]
        recorder.on_handled(event, now, commands)  # type: ignore[arg-type]
        return commands

    core.handle = handle  # type: ignore[method-assign,assignment]
    world = World(core, scenario, random_arrivals(scenario, None))
    world.start()
    assert world.run(8)
    file.write_bytes(recorder.take())
    done = [(one.arrived, one.done) for one in world.queue.requests]
    return read_recording(file), [(of[0] - at, of[-1] - of[0]) for at, of in done]


@pytest.mark.slow
def test_the_second_prompt_finds_what_the_first_has_left(tmp_path: Path) -> None:
    """Against the simulator's own recording: it takes as long once more, and less than with an empty cache."""
    recording, times = recorded(tmp_path / "log")
    rows = recorded_runs.compare_in_turn(recording, times, "rtx3090-pcie3")
    for row in rows:
        assert row["ttft_s"] == pytest.approx(row["simulated_ttft_s"], rel=1e-6)
        assert row["token_s"] == pytest.approx(row["simulated_token_s"], rel=1e-6)
    cold = recorded_runs.compare(recording, [([0] * 16, 4)] * 2, times, "rtx3090-pcie3")
    assert cold[0]["simulated_ttft_s"] > 1.02 * rows[1]["simulated_ttft_s"]
    with pytest.raises(SystemExit, match="1 prompts were asked, 2 recorded"):
        recorded_runs.compare_in_turn(recording, times[:1], "rtx3090-pcie3")


def test_what_is_not_within_the_goal_is_named() -> None:
    one = {"token_s": 1.06, "simulated_token_s": 1.0, "ttft_s": 2.0, "simulated_ttft_s": 2.0}
    answers = [one, one | {"token_s": 1.02}]
    row = agreement_systems.row_of({"system": "fate", "profile": "p"}, {"answers": answers, "difference": None})
    assert row["ratio"] == pytest.approx(1.04)
    assert row["replayed"] == "identical"
    assert agreement_systems.outside([row]) == []
    late = agreement_systems.row_of({"system": "eap", "profile": "p"}, {"answers": [one], "difference": "a load"})
    early = row | {"system": "smoe", "ttft_ratio": 0.94}
    refused = agreement_systems.row_of({"system": "hobbit", "profile": "p"}, {"refused": "no room"})
    assert agreement_systems.outside([late, early, refused]) == ["eap", "smoe"]
    assert (late["replayed"], refused["refused"]) == ("a load", "no room")

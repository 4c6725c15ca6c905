"""Workers of different speeds: the cluster decodes at the speed that all of them together allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.simulation.requests import random_arrivals
from scheduler.simulation.scenario import OwnTimes, Scenario
from scheduler.simulation.simulate import simulate_requests
from scheduler.timing.profile import find_profile

EQUAL = (1.0,) * 8


def decode_speed(speeds: tuple[float, ...], requests: int) -> float:
    """Tokens a second on the paper's testbed, which waits for loads."""
    scenario = Scenario(find_profile("rtx3090-1gbe"), tokens=32, requests=requests, speeds=speeds)
    return simulate_requests(scenario, random_arrivals(scenario, 0.97)).decode_tokens_per_s


@pytest.mark.parametrize("requests", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "speeds",
    [(*EQUAL[:7], 0.5), (0.25, *EQUAL[1:]), (1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 0.5, 0.5), (*EQUAL[:3], 2.0, *EQUAL[4:])],
    ids=["half", "quarter", "four at half", "twice"],
)
def test_a_slow_worker_costs_little_more_than_its_own_share(speeds: tuple[float, ...], requests: int) -> None:
    allowed = decode_speed(EQUAL, requests) * sum(speeds) / len(speeds)
    assert decode_speed(speeds, requests) >= 0.9 * allowed


def test_times_of_a_worker_are_the_same_as_its_speed() -> None:
    profile = find_profile("rtx3090-1gbe")
    slow = OwnTimes(1, 2 * profile.load_s, 2 * profile.expert_s)
    uneven = (slow, *[OwnTimes(1, profile.load_s, profile.expert_s)] * 7)
    scenario = Scenario(profile, tokens=16, uneven=uneven)
    found = simulate_requests(scenario, random_arrivals(scenario, 0.97)).decode_tokens_per_s
    by_speed = replace(scenario, uneven=(), speeds=(0.5, *EQUAL[1:]))
    assert found == simulate_requests(by_speed, random_arrivals(by_speed, 0.97)).decode_tokens_per_s


def test_host_memory_of_a_worker_is_the_same_as_everybody_s() -> None:
    profile = find_profile("rtx3090-1gbe")
    assert profile.disk_load_s
    own = OwnTimes(2, profile.load_s, profile.expert_s, 20, profile.disk_load_s)
    scenario = Scenario(profile, tokens=16, workers=4, slots=2, host_slots=20)
    each = replace(scenario, slots=1, host_slots=None, uneven=(own,) * 4)
    speeds = [simulate_requests(one, random_arrivals(one, 0.97)).decode_tokens_per_s for one in (scenario, each)]
    assert speeds[0] == speeds[1]


def test_a_cluster_that_is_slower_as_a_whole_keeps_the_papers_ring() -> None:
    """All at half the speed: only the loads' and computations' times change, and nobody has other turns."""
    assert decode_speed((0.5,) * 8, 1) >= 0.5 * decode_speed(EQUAL, 1)

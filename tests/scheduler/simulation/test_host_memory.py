"""Host memory between disk and device, simulated: worked out by hand in whole seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.errors import ConfigError
from scheduler.simulation.simulate import Outcome, simulate
from scheduler.simulation.workload import random_workload
from scheduler.timing.profile import Profile, find_profile
from support.scheduling.one_layer import ONE_LAYER
from support.scheduling.scenarios import scenario_of

ONE = replace(ONE_LAYER, disk_load_s=5.0)


def run(host_slots: int | None, policy: str = "lru", profile: Profile = ONE) -> Outcome:
    chosen = {"predictor": "none", "prefill": "pipelined", "host_residency": policy}
    scenario = scenario_of(profile, tokens=9, prompt_tokens=1, slots=3, host_slots=host_slots, **chosen)
    return simulate(scenario, random_workload(scenario))


@pytest.mark.parametrize(
    ("host_slots", "policy", "from_disk"),
    [(None, "lru", 0), (3, "lru", 0), (0, "lru", 3), (2, "lru", 3), (2, "belady", 1), (1, "belady", 2)],
)
def test_a_token_takes_what_its_experts_need_from_their_tiers(
    host_slots: int | None, policy: str, from_disk: int
) -> None:
    """Two host slots for three experts that come in turn: LRU always drops the one that is next, Belady's keeps two."""
    outcome = run(host_slots, policy)
    assert outcome.token_s[-1] - outcome.token_s[-2] == pytest.approx(4 + 3 * 10 + from_disk * 5 + 1)
    assert outcome.token_s[0] - outcome.answer.ttft_s > 0
    assert (
        outcome.stats.loads_from_memory == 0
        if not host_slots
        else outcome.stats.loads_from_memory >= (3 - from_disk) * 8
    )


def test_the_first_token_comes_from_disk() -> None:
    assert run(3).ttft_s == pytest.approx(run(None).ttft_s + 3 * 5)


def test_a_profile_says_what_a_disk_takes_or_there_is_no_tier_above_it() -> None:
    with pytest.raises(ConfigError, match=r"no time for a load from disk.*disk_load_ms, or leave --host-memory out"):
        run(2, profile=replace(ONE, disk_load_s=None))
    for name in ("rtx3090-1gbe", "rtx3090-1gbe@2", "rtx3090-pcie3", "rtx3080-1gbe"):
        profile = find_profile(name)
        rate = profile.model_sizes[0] / profile.disk_load_s if profile.model_sizes and profile.disk_load_s else 0.0
        assert rate * (2 if name.endswith("@2") else 1) == pytest.approx(3.5e9, rel=1e-3), "as their comments say"
    assert replace(ONE, cancellable=False).ended_load_s(1.0, in_memory=False) == 15.0
    assert ONE.ended_load_s(12.0, in_memory=False) == 12.0, "a read from disk goes on after the time of a copy"

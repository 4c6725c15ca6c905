"""The fits of the paper's testbed: each decodes at the paper's speed."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from scheduler.alignment import LATE
from scheduler.policies.system_config import SystemConfig
from scheduler.simulation.scenario import RECALL, Scenario
from scheduler.simulation.simulate import simulate
from scheduler.simulation.workload import random_workload
from scheduler.timing.profile import Profile, find_profile
from support.cases import slow_except

PAPER = find_profile("rtx3090-1gbe")


PROFILES = [replace(PAPER, fits=()), *PAPER.other_fits()]


@pytest.mark.parametrize(
    "profile", slow_except([PROFILES[0], PROFILES[-1]], PROFILES), ids=lambda p: f"{p.load_s * 1e3:g} ms"
)
def test_each_gives_the_speed_that_the_paper_measured(profile: Profile) -> None:
    """3.69 tokens/s, with its own policy."""
    scenario = Scenario(profile, tokens=48, system=SystemConfig(departure=LATE))
    rates = [simulate(scenario, random_workload(scenario, RECALL, seed)).decode_tokens_per_s for seed in range(2)]
    assert fmean(rate for rate in rates if rate is not None) == pytest.approx(3.69, rel=0.03)


def test_a_piece_of_a_load_has_as_many_bytes_in_each() -> None:
    for fit in PAPER.other_fits():
        assert fit.load_piece_s / fit.load_s == pytest.approx(PAPER.load_piece_s / PAPER.load_s)
        assert not fit.fits

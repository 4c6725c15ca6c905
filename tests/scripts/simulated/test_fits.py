"""What each set of times says of other figures, on a small testbed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.alignment import Alignment
from scheduler.timing.profile import Profile, find_profile
from scripts.simulated import fits

SIMULATED = fits.Simulated(tokens=24, seeds=2)


def test_the_pairs_are_those_of_the_profile_and_the_cards_differ_in_computing_only() -> None:
    base = find_profile(fits.PROFILE)
    pairs = list(fits.fits())
    assert [(one.load_s, one.shadow_layer_s) for one, _ in pairs] == [(base.load_s, base.shadow_layer_s), *base.fits]
    for one, other in pairs:
        assert other.expert_s > one.expert_s
        assert (other.load_s, other.shadow_layer_s, other.hop_s) == (one.load_s, one.shadow_layer_s, one.hop_s)


@pytest.mark.slow
def test_a_row_of_a_small_testbed() -> None:
    small, other = (replace(one, layers=4) for one in next(fits.fits()))
    found = fits.row(SIMULATED, small, other)
    assert found["on_demand"] < found["late"] <= found["at_once"]
    # By hand: in turn, 4 layers load for all of 16 tokens' experts, two groups of loads a layer at least.
    assert found["ttft_16_s"] > 4 * 25e-3
    assert found["ttft_128_s"] > found["ttft_16_s"]
    assert found["fast_loads"] > 0
    assert found["second_slot_whole_loads"] < found["second_slot"] + 0.02
    assert fits.text_table(fits.COLUMNS, [found])


def test_at_the_break_even_both_periods_are_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows every fourth token gain 0.1 tokens/s, and a hundredth of recall costs as much."""

    def rate(profile: Profile, recall: float = fits.RECALL, alignment: Alignment | None = None) -> float:
        return 4.0 + 0.1 * (alignment is not None) - 10 * (fits.RECALL - recall)

    simulated = fits.Simulated(tokens=2, seeds=1)
    monkeypatch.setattr(simulated, "rate", rate)
    assert simulated.break_even(find_profile(fits.PROFILE)) == pytest.approx(0.01)

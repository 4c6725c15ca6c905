"""How much a profile's name slows it down."""

from __future__ import annotations

from scheduler.timing.profile import find_profile
from scripts.lib.timing.slowdown import slowdown


def test_it_is_what_the_profiles_times_are_multiplied_by() -> None:
    names = ("rtx3090-pcie3", "rtx3090-pcie3@10")
    one, ten = (find_profile(name) for name in names)
    assert [slowdown(name) for name in names] == [1, round(ten.load_s / one.load_s)] == [1, 10]
    assert [slowdown(name) for name in (None, "", "a@b/mine.yaml")] == [1, 1, 1]

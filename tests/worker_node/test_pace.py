"""Whose times a worker's pieces keep, by a clock that stands still."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.emulation.clock import Cancellation, Emulation
from scheduler.errors import ConfigError
from scheduler.timing.profile import find_profile
from worker_node.pace import RealPace, WorkerPace

PROFILE = replace(
    find_profile("rtx3090-1gbe"), load_s=0.04, expert_s=0.003, expert_extra_s=0.001, host_s=0.02, host_extra_s=0.01
)


def test_a_smaller_form_loads_as_much_faster_as_its_bytes_are_fewer() -> None:
    pace = WorkerPace(Emulation(PROFILE))
    start = pace.now()
    ends = []
    for share in (0.25, 1.0, 0.5):
        pace.begin_load(start)
        ends.append(pace.end_load(Cancellation(), share) - start)
    assert ends == pytest.approx([0.01, 0.05, 0.07], abs=1e-6)
    pace.begin_load(start)
    assert pace.end_load(Cancellation()) - start == pytest.approx(0.11, abs=1e-6), "the full form, unless said"


@pytest.mark.parametrize(("host", "one", "row"), [(False, 0.003, 0.001), (True, 0.02, 0.01)])
def test_a_device_and_a_host_compute_in_their_own_times(host: bool, one: float, row: float) -> None:
    pace = WorkerPace(Emulation(PROFILE, lambda: 50.0), host)
    due = 50.0
    for rows in (1, 3, 2):
        pace.begin_compute(50.0)
        due += one + (rows - 1) * row
        assert pace.end_compute(rows) == pytest.approx(due), "one after the other"
    assert pace.costs == (pytest.approx(one - row), row)


def test_restoring_occupies_the_processor_that_computes() -> None:
    pace = WorkerPace(Emulation(replace(PROFILE, restore_s=0.5), lambda: 50.0))
    pace.begin_compute(50.0)
    assert pace.end_compute(1, restored=True) == pytest.approx(50.503)
    pace.begin_compute(50.0)
    assert pace.end_compute(1) == pytest.approx(50.506)


def test_each_place_has_a_processor_of_its_own() -> None:
    emulation = Emulation(PROFILE, lambda: 50.0)
    device, host = WorkerPace(emulation), WorkerPace(emulation, host=True)
    for pace, ends in ((host, 50.02), (device, 50.003), (host, 50.04), (device, 50.006)):
        pace.begin_compute(50.0)
        assert pace.end_compute(1) == pytest.approx(ends)


def test_a_profile_without_a_host() -> None:
    with pytest.raises(ConfigError, match="no times for experts computed in host memory"):
        WorkerPace(Emulation(replace(PROFILE, host_s=None)), host=True)


def test_what_is_real_is_to_be_measured() -> None:
    assert RealPace().costs is None

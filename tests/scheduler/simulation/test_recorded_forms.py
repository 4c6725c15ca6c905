"""Forms in a simulation are those of the recorded run: their sizes, and what they cost on its workers."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.errors import ConfigError
from scheduler.eventlog.recording import Recording
from scheduler.policies.system_config import CoreConfig
from scheduler.simulation.recorded_forms import recorded_form_costs, recorded_profile
from scheduler.timing.profile import find_profile
from scheduler.types import Event, FormCost, ModelShape, WorkerJoined, WorkerLost

PROFILE = find_profile("rtx3090-pcie3")


def recording(*events: Event, **about: Any) -> Recording:
    core = CoreConfig(ModelShape((1, 3), 8, 2), 1)
    return Recording(about, core, [(0.0, event) for event in events], [[] for _ in events])


def test_a_form_takes_the_share_of_its_bytes() -> None:
    """Rounded to pages, as in the store: 94208 of 331776."""
    found = recorded_profile(PROFILE, recording(form_bytes={"": 331776, "int4": 94208}))
    assert found.form_share("int4") == 94208 / 331776
    assert found.form_load_s("int4") == pytest.approx(0.002382 * 94208 / 331776)
    assert found.form_share("int2") == PROFILE.form_share("int2"), "which the store did not have"
    assert (found.layers, found.experts, found.top_k) == (2, 8, 2)


def test_a_recording_that_does_not_say_has_the_profiles_forms() -> None:
    assert recorded_profile(PROFILE, recording()).form_share("int4") == PROFILE.form_share("int4")


@pytest.mark.parametrize(
    "sizes", [{"int4": 5}, {"": 0}, {"": True}, {"": 4096.0}, {"": 4096, "int3": 5}, "large", [4096]]
)
def test_sizes_that_cannot_be_are_named(sizes: Any) -> None:
    with pytest.raises(ConfigError, match="record the run again"):
        recorded_profile(PROFILE, recording(form_bytes=sizes))


def test_forms_cost_what_they_did_when_a_worker_first_joined() -> None:
    costs, later = (FormCost("", 2.0, 0.0, True),), (FormCost("", 3.0, 0.0, True),)
    came = [WorkerJoined(0, 1, forms=costs), WorkerJoined(1, 1), WorkerLost(0, "gone"), WorkerJoined(0, 1, forms=later)]
    assert recorded_form_costs(recording(*came)) == {0: costs}

"""What a recording says of the forms in which experts were loaded, and a profile for its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from scheduler.errors import ConfigError
from scheduler.eventlog.recording import Recording
from scheduler.policies.precision import FORMS, FULL
from scheduler.timing.profile import Profile
from scheduler.types import FormCost, WorkerJoined

FORM_BYTES = "form_bytes"
"""Of a recording's `about`: the bytes of an expert in each form of its store; the full form has the empty name."""


def recorded_profile(profile: Profile, recording: Recording) -> Profile:
    """A profile's times for the shape of the recorded model, and for forms of the size that its store has. Raises
    ConfigError for sizes that cannot be."""
    shape = recording.core_config.shape
    sizes = _form_bytes(recording.about.get(FORM_BYTES, {}))
    shares = tuple((form, sizes[form] / sizes[FULL]) for form in sizes if form != FULL)
    return replace(profile, layers=len(shape.layers), experts=shape.experts, top_k=shape.top_k, form_shares=shares)


def recorded_expert_bytes(recording: Recording) -> int:
    """Of an expert in the full form; 0 if the recording does not say. Raises ConfigError for what cannot be."""
    return _form_bytes(recording.about.get(FORM_BYTES, {})).get(FULL, 0)


def _form_bytes(sizes: Any) -> Mapping[str, int]:
    """Raises ConfigError."""
    fine = isinstance(sizes, Mapping) and (not sizes or FULL in sizes)
    if not fine or any(form not in FORMS or type(size) is not int or size < 1 for form, size in sizes.items()):
        raise ConfigError(
            f"the recording says of the forms of experts that they have {sizes!r:.80} bytes; it must be a positive "
            f"number for each of {', '.join(map(repr, FORMS))} that the store has, and for the full one; record the "
            "run again"
        )
    return dict(sizes)


def recorded_form_costs(recording: Recording) -> dict[int, tuple[FormCost, ...]]:
    """Worker -> what forms cost on it, as it joined first: a simulated one takes the same forms."""
    joined = (event for _, event in reversed(recording.events) if isinstance(event, WorkerJoined))
    return {event.worker: event.forms for event in joined if event.forms}

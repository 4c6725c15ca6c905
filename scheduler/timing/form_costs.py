"""What the forms of an expert cost by a profile."""

from __future__ import annotations

from scheduler.policies.precision import FULL
from scheduler.timing.profile import Profile
from scheduler.types import FormCost


def profile_form_costs(profile: Profile, forms: tuple[str, ...]) -> tuple[FormCost, ...]:
    """Of the full form and of `forms`, which fit, as in `WorkerJoined`; empty where there is no smaller one."""
    smaller = [form for form in forms if form != FULL]
    if not smaller:
        return ()
    full = FormCost(FULL, profile.load_s, 0.0, FULL in forms)
    return (full, *(FormCost(form, profile.form_load_s(form), profile.restore_s, True) for form in smaller))

"""The forms in which a worker loads experts, by what they cost on it: decided once, before its slots are made."""

from __future__ import annotations

from dataclasses import dataclass, replace

from checkpoint.expert import ExpertArithmetic
from checkpoint.store import ExpertStore
from scheduler.policies.precision import FULL, full_pays
from scheduler.timing.form_costs import profile_form_costs
from scheduler.timing.profile import Profile
from scheduler.types import FormCost
from worker_node.loaders.base import Loader
from worker_node.measure import load_bandwidth, restoring_seconds
from worker_node.restorer import Restorer
from worker_node.slots import Slots


@dataclass(frozen=True, slots=True)
class FormChoice:
    """What a worker is made with."""

    forms: tuple[str, ...] = ("",)
    slots: int = 1
    costs: tuple[FormCost, ...] = ()
    """Of the full form, and of those that the precision asks for; empty where they are unknown."""


def choose_forms(
    store: ExpertStore,
    arithmetic: ExpertArithmetic,
    loader: Loader,
    asked: FormChoice,
    full_slots: int,
    threads: int = 1,
) -> FormChoice:
    """The forms asked for, or the full form alone if loading the largest smaller one and restoring it takes longer.

    `asked`: the precision's forms, and as many slots as fit with them. `full_slots`: as many as fit in the full form in
    the same memory; 0 if those would be too few. `loader`: for the forms asked for, or with a tier for every form. It
    is closed here. `threads`: how many restore an expert together, on a CPU. Raises LaunchError, StoreError.
    """
    return settle_forms(asked, full_slots, _costs(store, arithmetic, loader, asked.forms, threads))


def settle_forms(asked: FormChoice, full_slots: int, costs: tuple[FormCost, ...]) -> FormChoice:
    """See `choose_forms`: by these costs."""
    if costs and full_slots and full_pays(asked.forms, costs):
        return FormChoice((FULL,), full_slots, tuple(cost._replace(fits=cost.form == FULL) for cost in costs))
    return FormChoice(asked.forms, asked.slots, costs)


def emulated_costs(profile: Profile, store: ExpertStore, forms: tuple[str, ...]) -> tuple[FormCost, ...]:
    """As in `FormChoice`, by a profile. Raises StoreError for a form that the store lacks."""
    manifest = store.manifest
    shares = tuple((form, manifest.form_bytes(form) / manifest.blob_bytes) for form in forms if form != FULL)
    return profile_form_costs(replace(profile, form_shares=shares), forms)


def _costs(
    store: ExpertStore, arithmetic: ExpertArithmetic, loader: Loader, forms: tuple[str, ...], threads: int
) -> tuple[FormCost, ...]:
    """Of the full form and of `forms`; those in `forms` fit. Empty where no load ended in time. Closes the loader."""
    manifest, smaller = store.manifest, tuple(form for form in forms if form != FULL)
    every = (FULL, *smaller)
    try:
        slots = Slots(1, max(map(manifest.form_bytes, every)), loader.device).buffers
        loader.prepare(slots)
        restorer = Restorer(store, arithmetic, every, loader.device, threads)
        # A loader to a GPU that has all experts has no other forms; it moves all at the same rate.
        held = every if loader.device == "cpu" or loader.tier is not None else forms
        rates, restoring = dict.fromkeys(every, 0.0), dict.fromkeys(every, 0.0)
        for form in held:
            rates[form] = load_bandwidth(store, loader, slots, form)
            if form != FULL or manifest.encoding:
                restoring[form] = restoring_seconds(restorer, loader, slots[0], manifest.moe_layers[0], form)
    finally:
        loader.close()
    rates = {form: rate or rates[held[0]] for form, rate in rates.items()}
    if not all(rates.values()):
        return ()
    return tuple(
        FormCost(form, manifest.form_bytes(form) / rates[form], restoring[form], form in forms) for form in every
    )

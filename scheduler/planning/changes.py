"""What would help: single changes to a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from scheduler.alignment import Alignment
from scheduler.errors import DoesNotFitError
from scheduler.planning.scaling import (
    Change,
    Run,
    Setup,
    at_once,
    equation_1,
    memory,
    scale_profile,
    size_text,
    workers_needed,
)
from scheduler.planning.shadow_devices import shadow_shares

_LINKS = ((2.5e9, "2.5"), (10e9, "10"))
_BFLOAT16 = 2


_Candidate = tuple[str, str, Setup, int, int]
"""(description, price, changed setup, group size, slots)."""


class Trial(NamedTuple):
    """A change before it is simulated; the fields are those of `Change`."""

    what: str
    price: str
    run: Run
    real: bool
    alone: bool

    def at_fits(self, fits: Sequence[Setup]) -> list[Run]:
        """The change with the times of each other fit of the base profile; none if it is not real."""
        setup = self.run.setup
        return [replace(self.run, setup=_on(setup, base=one.hardware.base)) for one in fits] if self.real else []


def trials(setup: Setup, group_size: int, slots: int) -> list[Trial]:
    """Every single change."""
    real = [*_hardware(setup, group_size, slots), *_policy(setup, group_size, slots)]
    every = [(True, one) for one in real] + [(False, one) for one in _limits(setup, group_size, slots)]
    return [
        Trial(what, price, Run(other, group, room), possible, other.policy.shadow == "none" != setup.policy.shadow)
        for possible, (what, price, other, group, room) in every
    ]


def compare_speeds(
    trial: Trial,
    rate: float,
    rates_at_fits: Sequence[float],
    unchanged: float,
    unchanged_at_fits: Sequence[float],
    planned: float,
) -> Change:
    """What a change does to the speeds without it, all in tokens/s of equally long answers, and so to the `planned`
    one."""
    factor = rate / unchanged if unchanged else 1.0
    found = Change(trial.what, factor * planned, factor, trial.price, trial.real, trial.alone)
    if not rates_at_fits:
        return found
    pairs = zip(rates_at_fits, unchanged_at_fits, strict=True)
    factors = [factor, *(changed / before for changed, before in pairs if before)]
    return replace(found, factors=(min(factors), max(factors)))


def _hardware(setup: Setup, group_size: int, slots: int) -> Iterator[_Candidate]:
    model, hardware = setup.model, setup.hardware
    profile = scale_profile(setup)
    worker = memory(setup, slots + 1)["worker"]
    fits = hardware.device_bytes is None or worker <= hardware.device_bytes
    yield (
        f"{slots + 1} slots per worker in place of {slots}",
        f"{size_text(worker)} of device memory per worker" + ("" if fits else ", more than --worker-memory"),
        setup,
        group_size,
        slots + 1,
    )
    more, enough = hardware.workers + group_size, workers_needed(equation_1(profile, group_size))
    for workers in sorted({more, enough}):
        if hardware.workers < workers <= 4 * hardware.workers:
            what = f"{workers} workers in place of {hardware.workers}"
            what += ": equation (1) then holds" if workers == enough else ""
            yield what, _machines(workers - hardware.workers), _on(setup, workers=workers), group_size, slots
    if profile.load_s:
        rate = 2 * model.expert_bytes / profile.load_s
        yield f"loads twice as fast: {size_text(rate)}/s", "", _on(setup, load_bytes_per_s=rate), group_size, slots
    for bits, name in _LINKS:
        if bits > profile.link_bits_per_s:
            yield f"links of {name} Gbit/s", "", _on(setup, link_bits_per_s=bits), group_size, slots
    for part, what in (("main", "a main node"), ("worker", "workers that compute"), ("shadow", "a shadow")):
        if part != "shadow" or setup.policy.shadow != "none":
            yield f"{what} twice as fast", "", _on(setup, **{part: 2 * getattr(hardware, part)}), group_size, slots
    yield ("message handling twice as fast", "", _on(setup, messages=2 * hardware.messages), group_size, slots)


def _policy(setup: Setup, group_size: int, slots: int) -> Iterator[_Candidate]:
    model, policy = setup.model, setup.policy
    if _roomy(setup):
        yield _keep_all(setup, group_size)
    if model.item_bytes > _BFLOAT16:
        half = replace(setup, model=replace(model, item_bytes=_BFLOAT16))
        yield (
            "bfloat16 in place of float32",
            "halves all memory except the shadow's; answers are those of the bfloat16 model",
            half,
            group_size,
            slots,
        )
    if policy.shadow == "none":
        for scheme in ("int8", "nf4"):
            other = replace(setup, policy=replace(policy, shadow=scheme, recall=None))
            if _fits(other, slots):
                yield f"with an {scheme} shadow", _price(other, slots), other, group_size, slots
                return
        return
    now = memory(setup, slots)["shadow"]
    alone = replace(setup, policy=replace(policy, shadow="none"))
    yield "no shadow: loads begin at the gate", f"saves {size_text(now)} of memory", alone, group_size, slots
    for scheme in ("fp16", "int8", "nf4"):
        if scheme != policy.shadow:
            other = replace(setup, policy=replace(policy, shadow=scheme, recall=None))
            if _fits(other, slots):
                price = f"{_price(other, slots)} in place of {size_text(now)}"
                yield f"{scheme} shadow in place of {policy.shadow}", price, other, group_size, slots


def _fits(setup: Setup, slots: int) -> bool:
    """Whether the shadow takes less than the whole model: a machine for a larger one would hold every expert itself.
    And whether it fits on its devices, if their memory is given."""
    found = memory(setup, slots)
    if found["shadow"] >= found["whole"]:
        return False
    try:
        shadow_shares(setup)
    except DoesNotFitError:
        return False
    return True


def _price(setup: Setup, slots: int) -> str:
    return f"a machine with {size_text(memory(setup, slots)['shadow'])} for the shadow"


def _keep_all(setup: Setup, group_size: int) -> _Candidate:
    """Every expert stays in a slot. This takes as much memory as the whole model."""
    model, workers = setup.model, setup.hardware.workers
    slots = -(-model.layers * model.experts // workers)
    price = f"{slots} slots, {size_text(memory(setup, slots)['worker'])} per worker"
    other = at_once(replace(setup, policy=replace(setup.policy, chosen=replace(setup.policy.chosen, residency="all"))))
    return "every expert kept on a worker (--residency all)", price, other, group_size, slots


def _limits(setup: Setup, group_size: int, slots: int) -> Iterator[_Candidate]:
    """Changes that are not possible in practice, but show where the remaining time goes."""
    policy = setup.policy
    if not _roomy(setup):
        yield _keep_all(setup, group_size)
    if policy.shadow == "none":
        return
    perfect = replace(setup, policy=replace(policy, recall=1.0))
    yield "if every prediction were right", "", perfect, group_size, slots
    early = replace(setup, policy=replace(policy, alignment=Alignment(0, 0), recall=policy.expected_recall))
    yield "if the shadow needed no alignment for the same recall", "", early, group_size, slots


def _roomy(setup: Setup) -> bool:
    """Whether the workers are known to have room for every expert."""
    model, hardware = setup.model, setup.hardware
    return (
        hardware.device_bytes is not None and hardware.slots(model) * hardware.workers >= model.layers * model.experts
    )


def _on(setup: Setup, **different: Any) -> Setup:
    return replace(setup, hardware=replace(setup.hardware, **different))


def _machines(count: int) -> str:
    return f"{count} more machine{'s' if count > 1 else ''}"

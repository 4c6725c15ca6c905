"""What would help: single changes to a plan, each simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from scheduler.alignment import Alignment
from scheduler.planning.scaling import (
    Change,
    Each,
    Run,
    Setup,
    at_once,
    equation_1,
    memory,
    rates,
    scaled,
    size_text,
    workers_needed,
)
from scheduler.timing.profile import Profile

_LINKS = ((2.5e9, "2.5"), (10e9, "10"))
_BFLOAT16 = 2


_Different = tuple[str, str, Setup, int, int]
"""(description, price, changed setup, group size, slots)."""


def changes(
    setup: Setup,
    group_size: int,
    slots: int,
    tokens_per_s: float,
    at_fits: Sequence[tuple[Profile, float]] = (),
    step: Callable[[], None] = lambda: None,
    each: Each = map,
) -> tuple[Change, ...]:
    """Every single change, best first. `tokens_per_s`: the speed without a change. `step`: called after each
    simulation. `at_fits`: the other fits of the base profile, and the speed with each."""
    real = [*_hardware(setup, group_size, slots), *_policy(setup, group_size, slots)]
    every = [*real, *_limits(setup, group_size, slots)]
    runs = [Run(other, group, room) for _, _, other, group, room in every]
    found: list[tuple[Change, Run]] = []
    for (what, price, other, _, _), run, rate in zip(every, runs, rates(each, step, runs), strict=True):
        factor = rate / tokens_per_s if tokens_per_s else 1.0
        alone = other.policy.shadow == "none" != setup.policy.shadow
        found.append((Change(what, rate, factor, price, len(found) < len(real), alone), run))
    ranked = sorted(found, key=lambda pair: -pair[0].factor)
    return tuple(_over_fits(change, run, at_fits, step, each) for change, run in ranked)


def _over_fits(
    change: Change, run: Run, at_fits: Sequence[tuple[Profile, float]], step: Callable[[], None], each: Each
) -> Change:
    if not at_fits or not change.real:
        return change
    runs = [replace(run, setup=_on(run.setup, base=base)) for base, _ in at_fits]
    factors = [rate / before for rate, (_, before) in zip(rates(each, step, runs), at_fits, strict=True) if before]
    return replace(change, factors=(min(change.factor, *factors), max(change.factor, *factors)))


def _hardware(setup: Setup, group_size: int, slots: int) -> Iterator[_Different]:
    model, hardware = setup.model, setup.hardware
    profile = scaled(setup)
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


def _policy(setup: Setup, group_size: int, slots: int) -> Iterator[_Different]:
    model, policy = setup.model, setup.policy
    if _roomy(setup):
        yield _kept(setup, group_size)
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
        other = replace(setup, policy=replace(policy, shadow="int8", recall=None))
        yield "with an int8 shadow", f"{size_text(memory(other, slots)['shadow'])} for it", other, group_size, slots
        return
    now = memory(setup, slots)["shadow"]
    alone = replace(setup, policy=replace(policy, shadow="none"))
    yield "no shadow: loads begin at the gate", f"saves {size_text(now)} of memory", alone, group_size, slots
    for scheme in ("fp16", "int8", "nf4"):
        if scheme != policy.shadow:
            other = replace(setup, policy=replace(policy, shadow=scheme, recall=None))
            price = f"{size_text(memory(other, slots)['shadow'])} for the shadow in place of {size_text(now)}"
            yield f"{scheme} shadow in place of {policy.shadow}", price, other, group_size, slots


def _kept(setup: Setup, group_size: int) -> _Different:
    """Every expert stays in a slot. This takes as much memory as the whole model."""
    model, workers = setup.model, setup.hardware.workers
    slots = -(-model.layers * model.experts // workers)
    price = f"{slots} slots, {size_text(memory(setup, slots)['worker'])} per worker"
    other = at_once(replace(setup, policy=replace(setup.policy, chosen=replace(setup.policy.chosen, residency="all"))))
    return "every expert kept on a worker (--residency all)", price, other, group_size, slots


def _limits(setup: Setup, group_size: int, slots: int) -> Iterator[_Different]:
    """Changes that are not possible in practice, but show where the remaining time goes."""
    policy = setup.policy
    if not _roomy(setup):
        yield _kept(setup, group_size)
    if policy.shadow == "none":
        return
    perfect = replace(setup, policy=replace(policy, recall=1.0))
    yield "if every prediction were right", "", perfect, group_size, slots
    early = replace(setup, policy=replace(policy, alignment=Alignment(0, 0), recall=policy.expected))
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

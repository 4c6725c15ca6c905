"""A plan for machines that people have: what to run on which, how fast it is, and what would help most."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from scheduler.errors import DoesNotFitError
from scheduler.planning.layout_speed import guess, speed
from scheduler.planning.machines import (
    CACHE,
    GPU_RATE,
    GPU_RESERVE,
    REPLICAS,
    Layout,
    Machine,
    layouts,
    with_replicas,
)
from scheduler.planning.role_bytes import CPU_REST_BYTES, main_bytes, shadow_bytes
from scheduler.planning.scaling import Each, size_text
from scheduler.simulation.route_model import LIKE_TEXT
from scheduler.timing.profile import Profile
from scheduler.types import ModelSize

LEAST_ROUTES, MOST_ROUTES, LEAST_RATES = "uniform", "fine-moe", 0.75
"""The ends of a range: routes of which none is likelier than another, with machines at that share of their rates; and
routes that are as alike as those of this model."""
EVICTIONS = ("lru", "arc", "s3-fifo")
"""Residencies that are tried in place of lrfu, if experts are kept in a cache."""
_SIMULATED, _SIMULATED_CHANGED = 3, 2
"""Layouts that are simulated, best guesses first."""
_LINKS = (1e9, 2.5e9, 10e9)
_GPUS = (8e9, 12e9, 16e9, 24e9)
_FEW_BITS = 4.5
SMALLEST_SHADOW = "nf4"
_GAIN = 1.02
"""A change that gains less is none."""


@dataclass(frozen=True, slots=True)
class Home:
    """A model and machines, and the profile whose times are scaled to them."""

    base: Profile
    model: ModelSize
    machines: tuple[Machine, ...]
    kept: int = 0
    """Bytes of the main node for KV caches of earlier prompts."""
    replicas: int | None = None
    """How many workers have each expert on their disks; None: that is to be said."""


class Improvement(NamedTuple):
    """A change of the machines or the model, and tokens/s with it."""

    what: str
    tokens_per_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class MachineAdvice:
    """What to run on which machines. Rates in tokens a second of one request."""

    home: Home
    layout: Layout
    tokens_per_s: float
    least: float
    most: float
    alone: tuple[Layout, float] | None
    """The best of one machine, if several are advised."""
    tried: dict[Layout, float]
    """All that were simulated, best first."""
    unfit: tuple[str, ...]

    @property
    def given_bytes(self) -> int:
        """Memory of all machines, GPUs' too."""
        return int(sum(one.ram + one.gpu for one in self.home.machines))

    @property
    def used_bytes(self) -> int:
        return sum(sum(roles.values()) for roles in self.layout.memory().values())

    @property
    def cached(self) -> float:
        """The share of all experts that has slots."""
        return min(1.0, self.layout.slots / self.layout.experts)


class _Trial(NamedTuple):
    base: Profile
    layout: Layout
    routes: str


def _simulate(trial: _Trial) -> float:
    return speed(*trial)


def advise(home: Home, each: Each = map) -> MachineAdvice:
    """The fastest of the layouts that fit, with the eviction that suits it. Of those as fast within 2 %, the one with
    fewest machines, and lrfu, and parts of the store. Raises DoesNotFitError, ConfigError."""
    found = _ranked(home)
    one = [layout for layout in found if len(layout.machines) == 1][:1]
    tried = list(dict.fromkeys([*found[:_SIMULATED], *one]))
    rates = _rates(home, tried, each)
    best = _best(rates)
    if best.keeps == CACHE:
        rates |= _rates(home, [replace(best, eviction=name) for name in EVICTIONS], each)
        best = _best({layout: rate for layout, rate in rates.items() if layout.machines == best.machines})
    if home.replicas is None and best.replicas is None and len(best.parted) > REPLICAS:
        rates |= _rates(home, [parted] if (parted := with_replicas(best, REPLICAS)) else [], each)
        best = _best({layout: rate for layout, rate in rates.items() if layout.machines == best.machines})
    ends = [_Trial(home.base, best.at_rates(LEAST_RATES), LEAST_ROUTES), _Trial(home.base, best, MOST_ROUTES)]
    least, most = each(_simulate, ends)
    rate, ranked = rates[best], dict(sorted(rates.items(), key=lambda item: -item[1]))
    alone = (one[0], rates[one[0]]) if one and len(best.machines) > 1 else None
    return MachineAdvice(home, best, rate, min(least, rate), max(most, rate), alone, ranked, tuple(_unfit(home, best)))


def _rates(home: Home, chosen: Sequence[Layout], each: Each) -> dict[Layout, float]:
    trials = [_Trial(home.base, layout, LIKE_TEXT) for layout in chosen]
    return dict(zip(chosen, each(_simulate, trials), strict=True))


def _best(rates: dict[Layout, float]) -> Layout:
    """The first of those with fewest machines, and with parts of the store, among the fastest."""
    enough = max(rates.values()) / _GAIN
    fast = (one for one in rates if rates[one] >= enough)
    return min(fast, key=lambda layout: (len(layout.machines), layout.replicas is None))


def improve(advice: MachineAdvice, each: Each = map) -> list[Improvement]:
    """Single changes that gain something, best first."""
    changes = list(_changes(advice))
    ranked = [_ranked(changed)[:_SIMULATED_CHANGED] for _, changed in changes]
    trials = [_Trial(advice.home.base, layout, LIKE_TEXT) for found in ranked for layout in found]
    rates = iter(list(each(_simulate, trials)))
    found = []
    for (what, _), tried in zip(changes, ranked, strict=True):
        rate = max(next(rates) for _ in tried)
        found.append(Improvement(what, rate, rate / advice.tokens_per_s))
    return sorted((one for one in found if one.factor >= _GAIN), key=lambda one: -one.factor)


def _ranked(home: Home) -> list[Layout]:
    """Best guess first. Raises DoesNotFitError."""
    found = layouts(home.model, home.machines, home.kept, home.replicas)
    if not found:
        raise DoesNotFitError(_no_room(home))
    return sorted(found, key=lambda layout: -guess(home.base, layout))


def _no_room(home: Home) -> str:
    model, most = home.model, max(home.machines, key=lambda one: max(one.room, one.gpu_room))
    if layouts(model, [replace(one, disk_free=math.inf) for one in home.machines], home.kept, home.replicas):
        whole, largest = model.store_bytes + model.dense_bytes, max(home.machines, key=lambda one: one.disk_free)
        return (
            f"{model.name} does not fit: the main node's disk has the whole store, {size_text(whole)}, and the others' "
            f"parts of it; {largest.name} has {size_text(largest.disk_free)} free; give one more disk, or take experts "
            "in fewer bits (--experts int4)"
        )
    needed, has = main_bytes(model, home.kept), max(most.room, most.gpu_room, 0)
    if needed > has:
        fewer = "" if model.dense_saved else ", keep the dense part in few bits (--dense int4)"
        less = ", or less --kv-memory" if home.kept else ""
        what = f"all but the experts takes {size_text(needed)} on one machine"
        how = f"give one machine more memory{fewer}, or a shorter --context{less}"
    else:
        what = f"no machine has room for an expert of {size_text(model.expert_bytes)} beside that"
        how = "give one more memory, or take experts in fewer bits (--experts int4)"
    return f"{model.name} does not fit: {what}, and {most.name} has {size_text(has)} for nodes; {how}"


def _unfit(home: Home, best: Layout) -> Iterator[str]:
    """What was asked of the machines in vain."""
    model, whole = home.model, main_bytes(home.model) + home.model.store_bytes
    if best.slots < best.experts:
        lacking = (best.experts - best.slots) * model.expert_bytes
        yield f"all experts in memory: {size_text(lacking)} more"
    if best.shadow:
        return
    needed = shadow_bytes(model, SMALLEST_SHADOW, CPU_REST_BYTES)
    about = f"a shadow: {size_text(needed)} ({SMALLEST_SHADOW})"
    if needed >= whole:
        yield f"{about}, and the whole model takes {size_text(whole)}"
        return
    others = [one for one in home.machines if one != best.main.machine]
    room = max((max(one.room, one.gpu_room) for one in others), default=0.0)
    if needed > room:
        where = f"{size_text(max(room, 0))} is the most beside the main node's" if others else "there is one machine"
        yield f"{about} on a machine of its own, and {where}"


def _changes(advice: MachineAdvice) -> Iterator[tuple[str, Home]]:
    home = advice.home
    machines, model = home.machines, home.model

    def all_with(change: Callable[[Machine], Machine]) -> Home:
        return replace(home, machines=tuple(map(change, machines)))

    def each_with(**factors: float) -> Home:
        return all_with(lambda one: replace(one, **{name: by * getattr(one, name) for name, by in factors.items()}))

    every = "every machine" if len(machines) > 1 else "the machine"
    yield f"disks twice as fast ({_least(machines, 'disk')}/s now)", each_with(disk=2)
    if advice.cached < 1:
        yield f"twice the memory in {every}", each_with(ram=2)
    yield f"memory that is read twice as fast ({_least(machines, 'memory')}/s now)", each_with(memory=2)
    slowest = min(one.link for one in machines)
    if len(machines) > 1 and (faster := next((rate for rate in _LINKS if rate > slowest), None)):
        what = f"a network of {faster / 1e9:g} in place of {slowest / 1e9:g} Gbit/s"
        yield what, all_with(lambda one: replace(one, link=max(one.link, faster)))
    largest = max(machines, key=lambda one: one.ram)
    yield (
        f"another machine like {largest.name}",
        replace(home, machines=(*machines, replace(largest, name=f"another {largest.name}"))),
    )
    yield from _with_gpu(home)
    if not model.native_bits and model.item_bytes > 1:
        yield (
            "experts in 4 bits (--experts int4; answers are approximate)",
            replace(home, model=replace(model, native_bits=_FEW_BITS)),
        )
    if not model.dense_saved:
        saved = int(model.linear * (model.item_bytes - _FEW_BITS / 8))
        yield (
            "the dense part in 4 bits (--dense int4; answers are approximate)",
            replace(home, model=replace(model, dense_saved=saved)),
        )


def _with_gpu(home: Home) -> Iterator[tuple[str, Home]]:
    """One for the main node, if none holds it."""
    needed = main_bytes(home.model, home.kept)
    size = next((size for size in _GPUS if size - GPU_RESERVE >= needed), None)
    if size is None or any(one.gpu_room >= needed for one in home.machines):
        return
    first, *others = home.machines
    yield (
        f"a GPU of {size / 1e9:g} GB for the dense part",
        replace(home, machines=(replace(first, gpu=size, gpu_memory=GPU_RATE), *others)),
    )


def _least(machines: Sequence[Machine], name: str) -> str:
    return size_text(min(getattr(one, name) for one in machines))

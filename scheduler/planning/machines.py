"""Machines that people have, and how a model's roles may lie on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from scheduler.errors import ConfigError, DoesNotFitError
from scheduler.planning.role_bytes import (
    CPU_REST_BYTES,
    GPU_REST_BYTES,
    main_bytes,
    shadow_bytes,
    worker_bytes,
    workspace_bytes,
)
from scheduler.policies.system_config import SystemConfig
from scheduler.store_parts import fair_shares
from scheduler.timing.profile import Profile
from scheduler.types import ModelSize

NODE_BYTES = 830_000_000
"""Of Ray and a node's own process on a machine, before any expert (docs/lan.md)."""
SYSTEM_SHARE, SYSTEM_BYTES = 0.05, 400_000_000
"""Of a machine's memory, that and at least so much is left to its operating system."""
GPU_RESERVE = 500_000_000
"""Bytes of a GPU's memory that its driver and libraries take. Assumed."""
CORE_RATE = 8e9
"""Bytes a second that a core reads at most. Assumed: eight fill two channels of memory."""
BUS_RATE = 12e9
"""Bytes a second from host memory to a GPU: three quarters of PCIe 3.0 x16. Assumed."""
GPU_RATE = 270e9
"""Bytes a second that a GPU reads from its own memory, if not given: a GeForce RTX 4060's 272 GB/s."""

ALL, CACHE, NONE = "all", "cache", "none"
"""How a layout keeps experts: each in a slot of its own, in a cache, or not beyond their use."""
REPLICAS = 2
"""Workers that have each expert, of a store in parts: one may be lost."""
_LEAST_CACHE = 4
"""Slots of a worker from which a cache may pay beside a shadow."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes of memory; bytes a second that it reads from its disk and memory; bits a second of its link."""

    name: str
    ram: float
    disk: float
    memory: float
    link: float
    gpu: float = 0.0
    """Bytes of a GPU's memory; 0: none."""
    gpu_memory: float = GPU_RATE
    disk_free: float = math.inf
    """Bytes of its disk for the store."""

    @property
    def room(self) -> float:
        """Bytes that nodes may fill."""
        return self.ram - max(SYSTEM_BYTES, SYSTEM_SHARE * self.ram) - NODE_BYTES

    @property
    def gpu_room(self) -> float:
        return max(0.0, self.gpu - GPU_RESERVE)

    def rate(self, on_gpu: bool) -> float:
        """Bytes a second that it reads for computations."""
        return self.gpu_memory if on_gpu else self.memory


class Place(NamedTuple):
    """Where a role computes."""

    machine: Machine
    on_gpu: bool

    @property
    def rest_bytes(self) -> int:
        """Per element of what a shadow here does not quantise."""
        return GPU_REST_BYTES if self.on_gpu else CPU_REST_BYTES


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker."""

    place: Place
    slots: int
    load_rate: float
    """Bytes a second into a slot, from host memory if experts are there."""
    host_slots: int = 0
    """Of a GPU: experts in host memory, between disk and slots."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A model's roles on machines. A machine may have several."""

    model: ModelSize
    main: Place
    seats: tuple[Seat, ...]
    shadow: Place | None = None
    scheme: str = "none"
    """The shadow's."""
    eviction: str = "lrfu"
    """The residency, where experts are kept in a cache."""
    kept: int = 0
    """Bytes of the main node for KV caches of earlier prompts."""
    replicas: int | None = None
    """How many workers have each expert on their disks; None: all."""

    @property
    def machines(self) -> tuple[Machine, ...]:
        """Those that it uses, main node first."""
        used = [self.main.machine, *(seat.place.machine for seat in self.seats)]
        used += [self.shadow.machine] if self.shadow else []
        return tuple(dict.fromkeys(used))

    @property
    def parted(self) -> tuple[Machine, ...]:
        """Those whose disks may have parts of the store: workers alone. The main node and the shadow read all of it."""
        whole = {self.main.machine, *([self.shadow.machine] if self.shadow else [])}
        return tuple(one for one in self.machines if one not in whole)

    @property
    def parts(self) -> dict[str, int]:
        """Experts on the disks of machines with parts: equal numbers, less if a disk has less room. Raises
        DoesNotFitError."""
        if self.replicas is None:
            return {}
        experts, nbytes = self.experts, self.model.store_bytes
        rooms = {one.name: min(one.disk_free, nbytes) * experts // nbytes for one in self.parted}
        return {name: math.ceil(share) for name, share in fair_shares(experts, rooms, self.replicas).items()}

    def disk(self) -> dict[str, int]:
        """Bytes of the store by machine. Raises DoesNotFitError."""
        nbytes = self.model.store_bytes
        whole = dict.fromkeys((one.name for one in self.machines), nbytes + self.model.dense_bytes)
        return whole | {name: part * nbytes // self.experts for name, part in self.parts.items()}

    @property
    def slots(self) -> int:
        return sum(seat.slots for seat in self.seats)

    @property
    def experts(self) -> int:
        return self.model.layers * self.model.experts

    @property
    def keeps(self) -> str:
        """ALL, CACHE or NONE."""
        if self._holds_all():
            return ALL
        few = min(seat.slots for seat in self.seats) < _LEAST_CACHE
        return NONE if few and self.shadow else CACHE

    def _holds_all(self) -> bool:
        """Whether each expert can surely have a slot on a worker that has it on its disk. Those that some workers alone
        hold are at most their parts over `replicas` (Hall's theorem); other workers' slots may take what they lack."""
        parts, lacking, free = self.parts, 0, 0
        for seat in self.seats:
            part = parts.get(seat.place.machine.name)
            if part is None:
                free += seat.slots
            else:
                lacking += max(0, -(-part // (self.replicas or 1)) - seat.slots)
        return self.slots >= self.experts and lacking <= free

    @property
    def preset(self) -> str:
        """The system to run, by its name."""
        if self.keeps == ALL:
            return "fully-cached"
        if self.shadow:
            return "od-moe"
        return "lrfu-prefetch" if len(self.machines) == 1 else "on-demand"

    @property
    def system(self) -> SystemConfig:
        """As it is simulated: loads that take no time stand for slots that are never evicted."""
        residency = self.eviction if self.keeps == CACHE else "none"
        return SystemConfig(predictor="sep" if self.shadow else "none", residency=residency)

    def at_rates(self, share: float) -> Layout:
        """The same on machines whose disks, memories and links have that share of their rates."""

        def slower(place: Place) -> Place:
            m = place.machine
            rates = {name: share * getattr(m, name) for name in ("disk", "memory", "link", "gpu_memory")}
            return place._replace(machine=replace(m, **rates))

        seats = tuple(replace(one, place=slower(one.place), load_rate=share * one.load_rate) for one in self.seats)
        shadow = slower(self.shadow) if self.shadow else None
        return replace(self, main=slower(self.main), seats=seats, shadow=shadow)

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes by machine and role, of host memory and its GPU's together."""
        found: dict[str, dict[str, int]] = {one.name: {"node": NODE_BYTES} for one in self.machines}
        found[self.main.machine.name]["main"] = main_bytes(self.model, self.kept)
        if self.shadow:
            held = shadow_bytes(self.model, self.scheme, self.shadow.rest_bytes)
            found[self.shadow.machine.name]["shadow"] = held + self.kept
        for seat in self.seats:
            taken = worker_bytes(self.model, seat.slots) + seat.host_slots * self.model.expert_bytes
            found[seat.place.machine.name]["worker"] = taken
        return found


def layouts(model: ModelSize, machines: Sequence[Machine], kept: int = 0, replicas: int | None = None) -> list[Layout]:
    """All that fit and may make sense, in no order: one machine or more, the roomiest first, each possible main node,
    workers on processors or GPUs, and a shadow if it is smaller than the model and has a machine beside the main
    node's. `replicas`: as in `Layout`; if not given, as many as disks have room for."""
    found: dict[Layout, None] = {}
    ranked = sorted(machines, key=lambda one: -(one.room + one.gpu_room))
    for chosen in _choices(ranked):
        for main in _mains(model, chosen, kept):
            for on_gpu in sorted({False, any(one.gpu for one in chosen)}):
                for scheme, shadow in _shadows(model, chosen, main):
                    layout = _layout(model, chosen, main, on_gpu, (scheme, shadow), kept)
                    layout = _on_disks(layout, replicas) if layout else None
                    if layout and not (layout.shadow and layout.keeps == ALL):  # it would predict nothing
                        found[layout] = None
    return list(found)


def _choices(ranked: Sequence[Machine]) -> Iterator[Sequence[Machine]]:
    """One machine of each kind, and the first two, half of them, and all."""
    yield from ([one] for one in _kinds(ranked))
    for count in sorted({2, (len(ranked) + 1) // 2, len(ranked)} - {1}):
        if count <= len(ranked):
            yield ranked[:count]


def _kinds(machines: Sequence[Machine]) -> list[Machine]:
    """The first of each kind."""
    kinds: dict[Machine, Machine] = {}
    for one in machines:
        kinds.setdefault(replace(one, name=""), one)
    return list(kinds.values())


def _mains(model: ModelSize, chosen: Sequence[Machine], kept: int) -> Iterator[Place]:
    needed = main_bytes(model, kept)
    for one in _kinds(chosen):
        if one.gpu_room >= needed:
            yield Place(one, True)
        if one.room >= needed:
            yield Place(one, False)


def _shadows(model: ModelSize, chosen: Sequence[Machine], main: Place) -> Iterator[tuple[str, Place | None]]:
    """None; and of each scheme the fastest place that has room, on another machine than the main node."""
    yield "none", None
    others = [one for one in _kinds(chosen) if one != main.machine]
    others += [one for one in chosen if replace(one, name="") == replace(main.machine, name="") != one][1:2]
    whole = main_bytes(model) + model.store_bytes
    for scheme in ("int8", "nf4"):
        places = [Place(one, True) for one in others if one.gpu_room >= shadow_bytes(model, scheme, GPU_REST_BYTES)]
        places += [Place(one, False) for one in others if one.room >= shadow_bytes(model, scheme, CPU_REST_BYTES)]
        if places and shadow_bytes(model, scheme, places[0].rest_bytes) < whole:
            yield scheme, max(places, key=lambda one: one.machine.rate(one.on_gpu))


def _layout(
    model: ModelSize, chosen: Sequence[Machine], main: Place, on_gpu: bool, shadow: tuple[str, Place | None], kept: int
) -> Layout | None:
    scheme, at = shadow
    room = {(one, gpu): one.gpu_room if gpu else one.room for one in chosen for gpu in (False, True)}
    room[main] -= main_bytes(model, kept)
    if at is not None:
        room[at] -= shadow_bytes(model, scheme, at.rest_bytes) + kept
    if any(left < 0 for left in room.values()):
        return None
    seats = [seat for one in chosen if (seat := _seat(model, one, room, on_gpu))]
    return Layout(model, main, tuple(seats), at, scheme, kept=kept) if seats else None


def _on_disks(layout: Layout, replicas: int | None) -> Layout | None:
    """With those replicas; or with whole stores, and if these do not fit, with the most replicas for which disks have
    room. None if it does not fit."""
    most = len(layout.parted)
    tried = (None, *range(min(REPLICAS, most), 0, -1)) if replicas is None else (min(replicas, most) or None,)
    return next((found for number in tried if (found := with_replicas(layout, number))), None)


def with_replicas(layout: Layout, replicas: int | None) -> Layout | None:
    """No seat has more slots than its disk has experts, nor all more than there are. None if disks have too little
    room."""
    found = replace(layout, replicas=replicas)
    try:
        disk, parts = found.disk(), found.parts
    except DoesNotFitError:
        return None
    if any(disk[one.name] > one.disk_free for one in layout.machines) or not all(parts.values()):
        return None
    seats = []
    for seat in layout.seats:
        part = parts.get(seat.place.machine.name, layout.experts)
        seats.append(replace(seat, slots=min(seat.slots, part), host_slots=min(seat.host_slots, part)))
    return replace(found, seats=_without_surplus(layout.model, seats))


def _seat(model: ModelSize, one: Machine, room: dict[tuple[Machine, bool], float], on_gpu: bool) -> Seat | None:
    """On its GPU if that is asked for and has room for an expert, else on its processor."""
    for gpu in (True, False) if on_gpu and one.gpu else (False,):
        slots = int((room[one, gpu] - workspace_bytes(model)) // model.expert_bytes)
        if slots >= 1:
            held = max(0, int(room[one, False] // model.expert_bytes)) if gpu else 0
            held = min(held, model.layers * model.experts)
            return Seat(Place(one, gpu), slots, BUS_RATE if gpu else min(one.disk, BUS_RATE), held)
    return None


def _without_surplus(model: ModelSize, seats: Sequence[Seat]) -> tuple[Seat, ...]:
    """No more slots than experts; all seats give up the same share."""
    experts, total = model.layers * model.experts, sum(seat.slots for seat in seats)
    if total <= experts:
        return tuple(seats)
    return tuple(replace(seat, slots=-(-seat.slots * experts // total)) for seat in seats)


def defaults_of(base: Profile) -> tuple[float, float, float]:
    """Rates of disk, memory and link of the machines that a profile describes. Raises ConfigError."""
    if base.model_sizes is None or base.device_rates is None or not base.load_s or not base.is_networked:
        raise ConfigError(
            f"profile {base.name} lacks the sizes, devices, loads or link of its machines, so it cannot describe "
            "others; use pc-nvme-2.5gbe, or one that odmoe bench --output FILE has written"
        )
    return base.model_sizes[0] / base.load_s, base.device_rates[1], base.link_bits_per_s

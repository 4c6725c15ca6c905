"""The scenario of a simulation: cluster, system, and lengths of prompt and answer, checked when made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from scheduler import types as t
from scheduler.alignment import LATE, Alignment
from scheduler.drafts.length import DraftLengths
from scheduler.errors import ConfigError
from scheduler.held import ranges_of
from scheduler.policies.precision import FULL, full_pays
from scheduler.policies.registry import check, forms_of
from scheduler.policies.system_config import CoreConfig, SystemConfig
from scheduler.simulation.route_model import UNIFORM, RouteModel
from scheduler.store_parts import missing_parts
from scheduler.timing.form_costs import profile_form_costs
from scheduler.timing.profile import Profile

PROFILE, RECALL = "rtx3090-1gbe", 0.9734
"""The paper's testbed, and the recall of its int8 shadow."""

ALL_ROWS = 1 << 30
"""A mini-batch of any expert's rows: what does not travel is not cut into parts, as in a cluster of one process."""

_COUNTS = (
    "prompt_tokens",
    "tokens",
    "workers",
    "slots",
    "group_size",
    "mini_batch",
    "requests",
    "parallel",
    "block",
)


class OwnTimes(NamedTuple):
    """Of one worker among unlike ones, in seconds, and its slots."""

    slots: int
    load_s: float
    expert_s: float
    host_slots: int | None = None
    """As in `Scenario`."""
    disk_load_s: float = 0.0
    """From disk to host memory, if that is a tier."""
    part: int | None = None
    """Experts that its disk has room for, of a store in parts. None: it has all."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster, its system and its requests. Raises ConfigError naming the flag."""

    profile: Profile
    prompt_tokens: int = 16
    tokens: int = 64
    """Tokens of the answer, including the first one, which prefill gives."""
    workers: int | None = None
    """None: the profile's; likewise `group_size`."""
    slots: int = 1
    host_slots: int | None = None
    """Of each worker: experts for which its host memory has room, between disk and slots. None: it has all of them."""
    group_size: int | None = None
    alignment: Alignment = field(default_factory=Alignment)
    mini_batch: int | None = None
    host: bool = False
    """Experts can be computed in host memory, too, beside the workers. The profile must have times for that."""
    system: SystemConfig = field(default_factory=SystemConfig)
    form_costs: Mapping[int, tuple[t.FormCost, ...]] | None = None
    """Worker -> what forms cost on it, as in `WorkerJoined`, of a recording; they decide which forms are loaded. None:
    what they cost by the profile."""
    requests: int = 1
    """Requests of this prompt and answer, each with routes of its own."""
    arrivals: tuple[float, ...] = ()
    """Seconds at which they arrive, ascending; empty: all at the start."""
    parallel: int | None = None
    """Most requests that are open at once; others wait. None: all."""
    prefill_chunk: int = 256
    """Most tokens of prompts that a step reads while several requests are open; 0: no limit."""
    batch_dense: bool = False
    """The main node computes its layers for all requests of a step at once, rather than for each by itself."""
    block: int = 1
    """Rows of a decode pass: the last token, and drafts of the next ones, which cost nothing. Right drafts are tokens
    of the answer."""
    route_model: RouteModel = UNIFORM
    """Of requests whose routes are drawn."""
    prompt_s: float | None = None
    """Seconds in which all prompts are read. Nothing else of prefill is simulated then: slots are empty when decoding
    begins. None: it is simulated."""
    speeds: tuple[float, ...] = ()
    """How fast each worker loads and computes; 1 is the profile's. Empty: all are equal."""
    replicas: int | None = None
    """How many workers hold each expert, of a store in parts. None: all."""
    uneven: tuple[OwnTimes, ...] = ()
    """Of each worker, if they have different slots or times; `slots`, `host_slots` and `speeds` are not read then."""
    draft: int | str = 0
    """The shadow drafts: a decode pass has as many rows as there are drafts, at most this many; `auto`: chosen live."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; allowed: 1, 2, ...")
        if self.host_slots is not None:
            self.profile.lasting_load_s(in_memory=False)
            if self.host_slots < 0:
                raise ConfigError(f"host_slots is {self.host_slots}; allowed: 0, 1, 2, ...")
        check(self.system)
        self._check_arrivals()
        self._check_draft()
        if self.speeds and len(self.speeds) != self.worker_count:
            given = ",".join(f"{speed:g}" for speed in self.speeds)
            raise ConfigError(
                f"--speeds is {given}; allowed: a number for each of {self.worker_count} workers, as 1,1,0.5"
            )
        if self.group_size is not None and self.group_size > self.worker_count:
            raise ConfigError(f"--group-size is {self.group_size}; allowed: 1 to --workers ({self.worker_count})")
        if self.replicas is not None and not 1 <= self.replicas <= self.worker_count:
            raise ConfigError(f"--replicas is {self.replicas}; allowed: 1 to --workers ({self.worker_count})")

    def _check_arrivals(self) -> None:
        """Raises ConfigError."""
        if self.prefill_chunk < 0:
            raise ConfigError(f"--prefill-chunk is {self.prefill_chunk}; allowed: 0 (no limit), 1, 2, ...")
        if self.arrivals and len(self.arrivals) != self.requests:
            raise ConfigError(f"arrivals are {self.arrivals} for {self.requests} requests; give a time for each")
        if self.prompt_s is not None and (self.arrivals or self.parallel or not 0 <= self.prompt_s < math.inf):
            raise ConfigError(f"prompt_s is {self.prompt_s:g}; allowed: at least 0, for requests that begin together")
        if list(self.arrivals) != sorted(self.arrivals) or any(not 0 <= at < math.inf for at in self.arrivals):
            raise ConfigError(f"arrivals are {self.arrivals}; allowed: seconds of at least 0, ascending")

    def _check_draft(self) -> None:
        """Raises ConfigError."""
        self.draft_lengths()
        if self.draft and self.system.predictor != "sep":
            raise ConfigError(
                f"--draft is {self.draft}, and --predictor is {self.system.predictor}; drafts come from a shadow "
                "(--predictor sep)"
            )
        if self.draft and self.block > 1:
            raise ConfigError(f"--draft is {self.draft}, and a block has {self.block} rows; give one of the two")

    def draft_lengths(self) -> DraftLengths:
        """New ones, for all requests. Raises ConfigError."""
        return DraftLengths(self.draft, self.system.departure == LATE, self.profile.experts, self.profile.top_k)

    @property
    def worker_count(self) -> int:
        """How many workers there are."""
        return self.workers or self.profile.workers

    def slots_of(self, worker: int) -> int:
        """How many experts it has room for."""
        return self.uneven[worker].slots if self.uneven else self.slots

    def host_slots_of(self, worker: int) -> int | None:
        """Likewise in host memory."""
        return self.uneven[worker].host_slots if self.uneven else self.host_slots

    @property
    def total_slots(self) -> int:
        """Of all workers."""
        return sum(map(self.slots_of, range(self.worker_count)))

    def profile_of(self, worker: int) -> Profile:
        """Its times."""
        p = self.profile
        if self.uneven:
            own = self.uneven[worker]
            faster = own.expert_s / p.expert_s if p.expert_s else 1.0
            p = replace(p, load_s=own.load_s, disk_load_s=own.disk_load_s)
            return replace(p, expert_s=own.expert_s, expert_extra_s=p.expert_extra_s * faster)
        return p if not self.speeds or self.speeds[worker] == 1 else p.slow_down(1 / self.speeds[worker])

    def parts(self) -> list[tuple[t.HeldRange, ...] | None]:
        """What each worker holds of the store, as in `WorkerJoined`. A host place holds all."""
        numbers = range(self.worker_count)
        rooms = {str(n): float(own.part) for n, own in enumerate(self.uneven) if own.part is not None}
        rooms = rooms if self.uneven else dict.fromkeys(map(str, numbers), math.inf)
        if self.replicas is None or self.replicas == self.worker_count:
            return [None] * self.worker_count
        shape = self.shape
        sizes = {t.ExpertId(layer, expert): 1 for layer in shape.layers for expert in range(shape.experts)}
        parts = missing_parts(sizes, rooms, self.replicas, {})
        return [ranges_of(parts[str(n)]) if str(n) in parts else None for n in numbers]

    @property
    def group(self) -> int:
        """How many workers serve a layer together."""
        return self.group_size or min(self.profile.group_size, self.worker_count)

    def costs_of(self, worker: int) -> tuple[t.FormCost, ...]:
        """As in `WorkerJoined`. By the profile only the full form fits if the largest smaller one saves no time."""
        if self.form_costs is not None:
            return self.form_costs.get(worker, ())
        forms = forms_of(self.system)
        costs = profile_form_costs(self.profile, forms)
        if costs and full_pays(forms, costs):
            return tuple(cost._replace(fits=cost.form == FULL) for cost in costs)
        return costs

    def largest_form(self, costs: tuple[t.FormCost, ...]) -> str:
        """The form for which slots have room on a worker with these costs."""
        return next((cost.form for cost in costs if cost.fits), forms_of(self.system)[0])

    @property
    def shape(self) -> t.ModelShape:
        p = self.profile
        return t.ModelShape(tuple(range(p.layers)), p.experts, p.top_k)

    @property
    def core_config(self) -> CoreConfig:
        """The configuration of the scheduler's core."""
        mini_batch = self.mini_batch if self.mini_batch or self.profile.is_networked else ALL_ROWS
        return CoreConfig(self.shape, self.group, self.alignment, mini_batch, self.system)

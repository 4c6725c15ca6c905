"""The workers of the random worlds (`world.py`)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler import types as t

if TYPE_CHECKING:
    from support.worlds.world import World

NBYTES = 7


@dataclass(slots=True, eq=False)
class _Holding:
    """What is in a worker's slot, or on its way there. `waiting`: computations that came before its load had ended."""

    load: t.Load
    loaded: bool = False
    given_up: bool = False
    waiting: list[t.Compute] = field(default_factory=list)


class WorldHostMemory:
    """As worker_node's, which carries out loads one by one: a load that is asked for later sees what earlier ones have
    brought. What was given up is not there."""

    def __init__(self, slots: int) -> None:
        self.slots, self.loads, self.loads_from_memory = slots, 0, 0
        self.content: dict[int, t.Load] = {}

    def obey(self, c: t.Load) -> None:
        self.loads += 1
        for slot, load in list(self.content.items()):
            if load.expert == c.expert and (slot, load.form) != (c.host_slot, c.form):
                del self.content[slot]
        if c.host_slot is None or c.host_slot >= self.slots:
            return
        there = self.content.get(c.host_slot)
        if c.in_memory:
            assert there is not None, f"{c}: nothing is in host slot {c.host_slot}"
            assert (there.expert, there.form) == (c.expert, c.form), f"{c}: {there} is there"
            self.loads_from_memory += 1
        elif there is None or (there.expert, there.form) != (c.expert, c.form):
            self.content[c.host_slot] = c

    def give_up(self, c: t.Load) -> None:
        if c.host_slot is not None and self.content.get(c.host_slot) is c:
            del self.content[c.host_slot]

    def shrinks(self) -> bool:
        if self.loads % 20 or not self.slots:
            return False
        self.slots -= 1
        self.content.pop(self.slots, None)
        return True


class WorldWorker:
    """As worker_node's: loads side by side, one computation at a time, what it says arrives in order and later."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.host = world.plan.slots[number % len(world.plan.slots)] == 0
        self.dead = False
        self.ghost = world.rng.random() < 0.5  # what a dead one said last still arrives
        self.slots: dict[int, _Holding] = {}
        self.left: set[int] = set()  # slots that a last computation has freed since their last load
        self.work: deque[tuple[_Holding, t.Compute]] = deque()
        self.busy = False
        self.arrives = 0
        self.memory = WorldHostMemory(0 if self.host else world.plan.host_slots)

    def tell(self, event: t.Event) -> None:
        world = self.world
        self.arrives = max(self.arrives, world.now + world.ticks(world.plan.latency))
        world.at(self.arrives - world.now, lambda: None if self.dead and not self.ghost else world.post(event))

    def obey(self, c: t.Load | t.Evict | t.Compute) -> None:
        if self.dead:
            return
        if isinstance(c, t.Load):
            assert c.slot not in self.slots, f"{c}: the worker has {self.slots[c.slot].load} there"
            holding = self.slots[c.slot] = _Holding(c)
            self.left.discard(c.slot)
            self.memory.obey(c)
            if self.memory.shrinks():
                self.tell(t.HostMemoryShrunk(self.number, self.memory.slots))
            self.world.at(self.world.ticks(self.world.plan.load), lambda: self.loaded(holding))
        elif isinstance(c, t.Evict):
            assert c.slot in self.slots or c.slot in self.left, f"{c}: nothing is there"
            if c.slot in self.slots:
                holding = self.slots.pop(c.slot)
                holding.given_up = True
                if not holding.loaded:
                    self.memory.give_up(holding.load)
        elif self.host:
            self.work.append((_Holding(t.Load(self.number, 0, c.expert, 0), loaded=True), c))
            self.compute()
        elif c.slot in self.slots:
            holding = self.slots[c.slot]
            assert holding.load.expert == c.expert
            if holding.loaded:
                self.work.append((holding, c))
                self.compute()
            else:
                holding.waiting.append(c)

    def loaded(self, holding: _Holding) -> None:
        if holding.given_up or self.dead or self.killed_by(holding.load):
            return
        if self.world.fails():
            self.memory.give_up(holding.load)
            self.tell(t.LoadFailed(holding.load.load_id, "cannot read"))
            return
        holding.loaded = True
        self.tell(t.LoadEnded(holding.load.load_id, NBYTES))
        self.work.extend((holding, c) for c in holding.waiting)
        self.compute()

    def compute(self) -> None:
        while self.work and self.work[0][0].given_up:
            self.work.popleft()
        if self.work and not self.busy:
            self.busy = True
            holding, c = self.work.popleft()
            self.world.at(self.world.ticks(self.world.plan.compute), lambda: self.computed(holding, c))

    def killed_by(self, c: t.Load | t.Compute) -> bool:
        poison = self.world.plan.poison
        if poison is None or not poison.kills(c):
            return False
        self.ghost = True  # it was well until then
        self.world.kill(self)
        return True

    def computed(self, holding: _Holding, c: t.Compute) -> None:
        self.busy = False
        if not self.dead and self.killed_by(c):
            return
        if self.world.fails():
            self.tell(t.ComputeFailed(c.call_id, "cannot compute"))
        else:
            self.tell(t.ComputeEnded(c.call_id))  # also when it was given up meanwhile
            if c.evict and not holding.given_up:
                late = [other for held, other in self.work if held is holding]
                assert not late, f"{late} were sent after {c}, with which the expert leaves"
                holding.given_up = True
                del self.slots[c.slot]
                self.left.add(c.slot)
        self.compute()

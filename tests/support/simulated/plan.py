"""What happens in a simulated world, drawn from a seed: the cluster, its clients, its faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from support.simulated.baton import Process
from support.simulated.hosts import Host
from support.simulated.world import World

LAYERS, EXPERTS = 2, 4
PROMPTS: tuple[tuple[int, ...], ...] = ((5, 17, 3), (40, 2, 2, 9, 33, 21, 7), (11,), (5, 17, 3, 22, 13, 50))
"""The last one goes on as the first one's answer may: prompts that share a beginning are kept."""
TOKENS = 6
"""Most of an answer."""
LONG, STALL_S = 0.5, 9.0
"""How many worlds are faulty for longer than any request may wait, which is about so long."""


@dataclass(frozen=True)
class Client:
    at_s: float
    prompt: int
    tokens: int
    fate: str
    """`end`, or how it leaves: `cancel`, `close`, `drop`."""
    leaves: int
    """After so many tokens."""


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: str
    host: int
    """Of all; the shadow is the last one."""
    for_s: float
    count: int

    def __str__(self) -> str:
        return f"{self.at_s:.3f} s: {self.kind} of host {self.host} ({self.for_s:.2f} s, {self.count} times)"


@dataclass(frozen=True)
class Plan:
    seed: int
    settings: Mapping[str, Any]
    preempt: float
    clients: tuple[Client, ...]
    faults: tuple[Fault, ...]
    heals_s: float
    restart_s: float
    """How long a supervisor waits before it starts a dead process again."""

    @property
    def is_harmless(self) -> bool:
        """Whether every answer has to be whole."""
        return all(fault.kind in HARMLESS for fault in self.faults)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {dict(self.settings)}, preempt {self.preempt}", *map(str, self.clients)]
        return "\n".join([*lines, *map(str, self.faults), f"heals at {self.heals_s:.2f} s"])


# --- the table of faults ----------------------------------------------------------------------------------------------

Act = Callable[[World, Host, Fault], None]


def _during(begin: Callable[[Host], None], end: Callable[[Host], None]) -> Act:
    def act(world: World, host: Host, fault: Fault) -> None:
        begin(host)
        world.baton.sleep(fault.for_s)
        end(host)

    return act


def _kill(world: World, host: Host, fault: Fault) -> None:
    host.kill()


def _flap(world: World, host: Host, fault: Fault) -> None:
    for _ in range(4 * fault.count):
        host.kill()
        world.baton.sleep(fault.for_s / 4)


def _freeze(world: World, host: Host, fault: Fault) -> None:
    process = host.address.process
    if process is not None:
        world.baton.freeze(process)
        world.baton.sleep(fault.for_s)
        world.baton.thaw(process)


def _freeze_main(world: World, host: Host, fault: Fault) -> None:
    world.baton.freeze(world.main_process)
    world.baton.sleep(fault.for_s)
    world.baton.thaw(world.main_process)


def _stall(*ways: int) -> Act:
    def begin(host: Host) -> None:
        for way in ways:
            host.address.ways[way].stalled = True

    return _during(begin, lambda host: _pass_all(host))


def _pass_all(host: Host) -> None:
    for way in host.address.ways:
        way.stalled = False


def _slow_link(delay_s: float, bytes_per_s: float) -> Act:
    def begin(host: Host) -> None:
        for way in host.address.ways:
            way.delay_s, way.bytes_per_s = delay_s, bytes_per_s

    def end(host: Host) -> None:
        for way in host.address.ways:
            way.delay_s, way.bytes_per_s = 0.0002, 125e6

    return _during(begin, end)


def _parts(**values: str) -> Act:
    def act(world: World, host: Host, fault: Fault) -> None:
        for name, value in values.items():
            setattr(host.parts, name, value)
        host.parts.left, host.parts.reads_s = fault.count, fault.for_s

    return act


def _poison(world: World, host: Host, fault: Fault) -> None:
    """Whichever worker computes that expert dies."""
    for worker in world.workers:
        worker.parts.deadly = frozenset({(fault.count % LAYERS, host.number % EXPERTS)})


def _all_killed(world: World, host: Host, fault: Fault) -> None:
    for worker in world.workers:
        worker.kill()


FAULTS: dict[str, Act] = {
    "killed": _kill,
    "flaps": _flap,
    "frozen": _freeze,
    "main frozen": _freeze_main,
    "all killed": _all_killed,
    "poison": _poison,
    "link stalls": _stall(0, 1),
    "link stalls there": _stall(0),
    "link stalls back": _stall(1),
    "link slow": _slow_link(0.05, 2e5),
    "link narrow": _slow_link(0.002, 5e4),
    "disk error": _parts(disk="error"),
    "disk short": _parts(disk="short"),
    "disk slow": _parts(disk="slow"),
    "disk damaged": _parts(disk="damaged"),
    "computing error": _parts(computing="error"),
    "computing dies": _parts(computing="die"),
    "computing never ends": _parts(computing="never"),
    "computing slow": _parts(computing="slow"),
    "outputs not finite": _parts(computing="nan"),
    "outputs enormous": _parts(computing="huge"),
    "answers lost": _parts(answers="lost"),
    "answers twice": _parts(answers="twice"),
    "answers late": _parts(answers="late"),
    "answers stale": _parts(answers="stale"),
    "answers with huge numbers": _parts(answers="huge"),
}
HARMLESS = {"link slow", "disk short", "computing slow", "answers twice", "answers stale"}
"""They cost time, and no answer."""


# --- the draw ---------------------------------------------------------------------------------------------------------


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(seed)
    shadow = rng.random() < 0.4
    settings: dict[str, Any] = {
        "workers": rng.choice((1, 2, 2, 3)),
        "slots": rng.choice((1, 1, 2)),
        "shadow": "fp16" if shadow else "none",
        "parallel": rng.choice((1, 2, 8)),
        "prefill_chunk": rng.choice((2, 256)),
        "kv_memory": rng.choice((0, 1 << 20)),
        "audit": rng.choice((0.0, 0.2)),
        "check_loads": rng.choice(("all", "auto", "none")),
    }
    settings["slots"] *= settings["workers"]
    if shadow and rng.random() < 0.5:
        settings["draft"] = rng.choice((2, 4))
    clients = tuple(_client(rng) for _ in range(rng.choice((1, 1, 2, 3))))
    nodes = settings["workers"] + shadow
    kinds = list(FAULTS)
    faults = tuple(_fault(rng, kinds, nodes) for _ in range(rng.choice((0, 1, 1, 2, 3))))
    if not faults:  # the last one comes after a while in which nothing is sent but beats
        clients = (*clients[:-1], replace(clients[-1], at_s=clients[-1].at_s + 2.5))
    if any(fault.kind == "disk damaged" for fault in faults):
        settings["check_loads"] = "all"
    heals = max((fault.at_s + fault.for_s for fault in faults), default=0.0) + rng.uniform(0.5, 4.0)
    if rng.random() < LONG:
        heals += 3 * STALL_S
    return Plan(seed, settings, rng.choice((0.0, 0.02, 0.2)), clients, faults, heals, rng.uniform(0.02, 1.0))


def _fault(rng: random.Random, kinds: list[str], nodes: int) -> Fault:
    at_s, for_s = rng.uniform(0.0, 0.12), rng.uniform(0.05, 4.0)
    return Fault(at_s, rng.choice(kinds), rng.randrange(nodes), for_s, rng.randint(1, 5))


def _client(rng: random.Random) -> Client:
    fate = rng.choice(("end", "end", "end", "end", "cancel", "close", "drop"))
    tokens = rng.randint(1, TOKENS)
    return Client(rng.uniform(0.0, 0.1), rng.randrange(len(PROMPTS)), tokens, fate, rng.randint(0, tokens))


def heal(world: World, faults: Process) -> None:
    """All faults end: what is dead or suspect is started anew, and everything passes."""
    world.baton.kill(faults)
    for host in world.hosts:
        host.parts.__init__()  # type: ignore[misc]  # as it was made
        for way in host.address.ways:
            way.stalled, way.delay_s, way.bytes_per_s = False, 0.0002, 125e6
            world.baton.wake_all(way.waiting)
        host.kill()
        host.start()
    world.baton.thaw(world.main_process)


@dataclass
class Played:
    """What came of a plan."""

    plan: Plan
    trace: int
    tokens: int
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    switches: int = 0

"""The table of faults that `odmoe chaos` draws from, and what each does to the nodes of a running cluster."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from odmoe.chaos.spoil import LINK, SOON_S, STORE
from scheduler.errors import ConfigError

MAIN, SHADOW = "main node", "shadow"
FROZEN_S = (0.5, 3.0)
"""How long a frozen node stands still: below and above the silence after which it counts as lost."""
SLOW_S, RUNS_S, STANDS_S = 2.0, 0.02, 0.08
"""A slowed node runs a fifth of this time, in turns of these lengths."""
AGAIN_S, RETURN_S = 0.3, 60.0
"""Between two looks whether a worker that is killed as often as it comes back is back, and the longest wait for it."""
KILLS = 3


class Victims(Protocol):
    """The processes of a cluster, and its clients."""

    def workers(self) -> Sequence[str]:
        """Names of the workers, `worker 0` and so on."""

    def send(self, name: str, number: signal.Signals, again: bool = False) -> bool:
        """A signal to the process of a node. `again`: to the one that got its last. False: there is none just now."""

    def spoil(self, name: str, what: str, seconds: float) -> bool:
        """Cut a worker's link to the main node (`LINK`) or damage its store (`STORE`). It begins within `SOON_S`, and
        ends by itself after `seconds`. False: it cannot be done just now."""

    def leave(self) -> int:
        """Have every client leave its answer. Returns how many did."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`strike` names whom it hit, empty for nobody, and returns once the fault is over; nodes may come back later."""

    name: str
    about: str
    strike: Callable[[Victims, random.Random], str]
    needs: str = ""
    """`shadow`; `main`: the main node is a process of its own; `restarts`: it is started again by whoever supervises
    it; `hosts`: each worker has a link and a store of its own, and whoever asks may spoil them."""


def _kill(names: Callable[[Victims, random.Random], Sequence[str]]) -> Callable[[Victims, random.Random], str]:
    def strike(victims: Victims, rng: random.Random) -> str:
        return ", ".join(name for name in names(victims, rng) if victims.send(name, signal.SIGKILL))

    return strike


def _freeze(names: Callable[[Victims, random.Random], Sequence[str]]) -> Callable[[Victims, random.Random], str]:
    def strike(victims: Victims, rng: random.Random) -> str:
        frozen = [name for name in names(victims, rng) if victims.send(name, signal.SIGSTOP)]
        try:
            time.sleep(rng.uniform(*FROZEN_S))
        finally:  # Ctrl-C leaves no node frozen
            for name in frozen:
                victims.send(name, signal.SIGCONT, again=True)
        return ", ".join(frozen)

    return strike


def _spoil(
    what: str, names: Callable[[Victims, random.Random], Sequence[str]]
) -> Callable[[Victims, random.Random], str]:
    def strike(victims: Victims, rng: random.Random) -> str:
        chosen, seconds = names(victims, rng), rng.uniform(*FROZEN_S)
        hit = [name for name in chosen if victims.spoil(name, what, seconds)]
        if hit:
            time.sleep(SOON_S + seconds)
        return ", ".join(hit)

    return strike


def _slow(victims: Victims, rng: random.Random) -> str:
    name, end, again = ", ".join(_some(1)(victims, rng)), time.monotonic() + SLOW_S, False
    while name and time.monotonic() < end and victims.send(name, signal.SIGSTOP, again):
        again = True
        try:
            time.sleep(STANDS_S)
        finally:
            victims.send(name, signal.SIGCONT, again=True)
        time.sleep(RUNS_S)
    return name if again else ""


def _kill_again(victims: Victims, rng: random.Random) -> str:
    name, kills, end = ", ".join(_some(1)(victims, rng)), 0, time.monotonic() + RETURN_S
    while name and kills < KILLS and time.monotonic() < end:
        if victims.send(name, signal.SIGKILL):
            kills, end = kills + 1, time.monotonic() + RETURN_S
        time.sleep(AGAIN_S)
    return name if kills else ""


def _some(count: int) -> Callable[[Victims, random.Random], list[str]]:
    def names(victims: Victims, rng: random.Random) -> list[str]:
        workers = victims.workers()
        return rng.sample(workers, min(count, len(workers)))

    return names


def _all(victims: Victims, rng: random.Random) -> list[str]:
    return list(victims.workers())


def _leave(victims: Victims, rng: random.Random) -> str:
    left = victims.leave()
    return f"{left} answers" if left else ""


def _named(name: str) -> Callable[[Victims, random.Random], Sequence[str]]:
    return lambda victims, rng: [name]


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("worker-killed", "SIGKILL to one worker", _kill(_some(1))),
        Fault("two-killed", "SIGKILL to two workers at once", _kill(_some(2))),
        Fault("all-killed", "SIGKILL to every worker", _kill(_all)),
        Fault("worker-flaps", "SIGKILL to one worker, three times, each as it is back", _kill_again),
        Fault("worker-frozen", "SIGSTOP to one worker for .5 to 3 s", _freeze(_some(1))),
        Fault("all-frozen", "SIGSTOP to every worker for .5 to 3 s", _freeze(_all)),
        Fault("worker-slow", "one worker stands still four fifths of 2 s", _slow),
        Fault("shadow-killed", "SIGKILL to the shadow", _kill(_named(SHADOW)), "shadow"),
        Fault("shadow-frozen", "SIGSTOP to the shadow for .5 to 3 s", _freeze(_named(SHADOW)), "shadow"),
        Fault("main-frozen", "SIGSTOP to the main node for .5 to 3 s", _freeze(_named(MAIN)), "main"),
        Fault("main-killed", "SIGKILL to the main node, which Ray starts again", _kill(_named(MAIN)), "restarts"),
        Fault(
            "link-cut",
            "nothing passes between one worker and the main node for .5 to 3 s",
            _spoil(LINK, _some(1)),
            "hosts",
        ),
        Fault("all-cut", "the same for every worker", _spoil(LINK, _all), "hosts"),
        Fault(
            "store-damaged",
            "a byte of each expert in one worker's store is wrong for .5 to 3 s",
            _spoil(STORE, _some(1)),
            "hosts",
        ),
        Fault("clients-leave", "every client leaves its answer", _leave),
    )
}
"""By name."""


def chosen_faults(names: str | None, has: Sequence[str]) -> list[Fault]:
    """The faults of a list with commas; None: all that this cluster can have. `none`: no fault. `has`: of what faults
    need. Raises ConfigError."""
    able = [fault for fault in FAULTS.values() if not fault.needs or fault.needs in has]
    if names is None:
        return able
    if names == "none":
        return []
    for name in names.split(","):
        if name not in {fault.name for fault in able}:
            allowed = ", ".join([*(fault.name for fault in able), "none"])
            raise ConfigError(f"--faults has {name!r}; allowed for this cluster: {allowed}")
    return [FAULTS[name] for name in names.split(",")]

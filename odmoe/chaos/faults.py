"""The table of faults that `odmoe chaos` draws from, and what each does to the nodes of a running cluster."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from odmoe.chaos.spoil import FROZEN, LINK, SLOW, SOON_S, STORE
from scheduler.errors import ConfigError

MAIN, SHADOW = "main node", "shadow"
SPOILT_S = (0.5, 3.0)
"""How long something is spoilt: below and above the silence after which a node counts as lost."""
AGAIN_S, RETURN_S = 0.3, 60.0
"""Between two looks whether a worker that is killed as often as it comes back is back, and the longest wait for it."""
KILLS = 3


class Victims(Protocol):
    """The processes of a cluster, and its clients."""

    def workers(self) -> Sequence[str]:
        """Names of the workers, `worker 0` and so on."""

    def kill(self, names: Sequence[str]) -> list[str]:
        """SIGKILL to the processes of nodes. Returns who had one."""

    def spoil(self, names: Sequence[str], what: str, seconds: float) -> list[str]:
        """Cut workers' links to the main node (`LINK`), damage their stores (`STORE`), freeze nodes or let them run a
        fifth of the time (`FROZEN`, `SLOW`). It begins within `SOON_S`, and ends by itself after `seconds`. Returns
        whom it hits."""

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


Names = Callable[[Victims, random.Random], Sequence[str]]
Strike = Callable[[Victims, random.Random], str]


def _kill(names: Names) -> Strike:
    return lambda victims, rng: ", ".join(victims.kill(names(victims, rng)))


def _spoil(what: str, names: Names) -> Strike:
    def strike(victims: Victims, rng: random.Random) -> str:
        chosen, seconds = names(victims, rng), rng.uniform(*SPOILT_S)
        hit = victims.spoil(chosen, what, seconds)
        if hit:
            time.sleep(SOON_S + seconds)
        return ", ".join(hit)

    return strike


def _kill_again(victims: Victims, rng: random.Random) -> str:
    names, kills, end = _some_workers(1)(victims, rng), 0, time.monotonic() + RETURN_S
    while names and kills < KILLS and time.monotonic() < end:
        if victims.kill(names):
            kills, end = kills + 1, time.monotonic() + RETURN_S
        time.sleep(AGAIN_S)
    return ", ".join(names) if kills else ""


def _some_workers(count: int) -> Names:
    def names(victims: Victims, rng: random.Random) -> list[str]:
        workers = victims.workers()
        return rng.sample(workers, min(count, len(workers)))

    return names


def _all_workers(victims: Victims, rng: random.Random) -> list[str]:
    return list(victims.workers())


def _leave(victims: Victims, rng: random.Random) -> str:
    left = victims.leave()
    return f"{left} answers" if left else ""


def _node(name: str) -> Names:
    return lambda victims, rng: [name]


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("worker-killed", "SIGKILL to one worker", _kill(_some_workers(1))),
        Fault("two-killed", "SIGKILL to two workers at once", _kill(_some_workers(2))),
        Fault("all-killed", "SIGKILL to every worker", _kill(_all_workers)),
        Fault("worker-flaps", "SIGKILL to one worker, three times, each as it is back", _kill_again),
        Fault("worker-frozen", "SIGSTOP to one worker for .5 to 3 s", _spoil(FROZEN, _some_workers(1))),
        Fault("all-frozen", "SIGSTOP to every worker for .5 to 3 s", _spoil(FROZEN, _all_workers)),
        Fault("worker-slow", "one worker stands still four fifths of .5 to 3 s", _spoil(SLOW, _some_workers(1))),
        Fault("shadow-killed", "SIGKILL to the shadow", _kill(_node(SHADOW)), "shadow"),
        Fault("shadow-frozen", "SIGSTOP to the shadow for .5 to 3 s", _spoil(FROZEN, _node(SHADOW)), "shadow"),
        Fault("main-frozen", "SIGSTOP to the main node for .5 to 3 s", _spoil(FROZEN, _node(MAIN)), "main"),
        Fault("main-killed", "SIGKILL to the main node, which Ray starts again", _kill(_node(MAIN)), "restarts"),
        Fault(
            "link-cut",
            "nothing passes between one worker and the main node for .5 to 3 s",
            _spoil(LINK, _some_workers(1)),
            "hosts",
        ),
        Fault("all-cut", "the same for every worker", _spoil(LINK, _all_workers), "hosts"),
        Fault(
            "store-damaged",
            "a byte of each expert in one worker's store is wrong for .5 to 3 s",
            _spoil(STORE, _some_workers(1)),
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

"""Machines as people write them: `pc x3: ram=32GB disk=3.5GB/s gpu=8GB`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from odmoe.settings.units import LINK, RATE, SIZE, parse_bytes, parse_link, parse_rate
from scheduler.errors import ConfigError
from scheduler.limits import MAX_PLANNED_WORKERS
from scheduler.planning.machines import CORE_RATE, Machine, defaults_of
from scheduler.timing.profile import Profile
from scheduler.unknown_names import nearest

MACHINE = "NAME: ram=SIZE, as pc x3: ram=32GB disk=3.5GB/s gpu=8GB"
_FORM = re.compile(r"\s*([A-Za-z0-9_][A-Za-z0-9_.-]*)(?:\s+x([1-9][0-9]{0,3}))?\s*:\s*(.*)", re.ASCII)


def _cores(text: Any) -> int:
    if not re.fullmatch("[1-9][0-9]{0,3}", str(text), re.ASCII):
        raise ValueError("1, 2, ... 9999")
    return int(text)


_KEYS: dict[str, tuple[Callable[[Any], float], str]] = {
    "ram": (parse_bytes, SIZE),
    "disk": (parse_rate, RATE),
    "cores": (_cores, "1, 2, ... 9999"),
    "memory": (parse_rate, RATE),
    "net": (parse_link, LINK),
    "gpu": (parse_bytes, SIZE),
    "gpu-memory": (parse_rate, RATE),
    "disk-free": (parse_bytes, SIZE),
}


def parse_machines(texts: Iterable[str], base: Profile) -> tuple[Machine, ...]:
    """Every machine, `pc 1`, `pc 2`, ... of several of a kind. What is not given is as in the profile. Raises
    ConfigError."""
    found = [machine for text in texts for machine in _machines(text, base)]
    return _checked(found)


def machines_of_hosts(texts: Iterable[str], hosts: Sequence[str], base: Profile) -> tuple[Machine, ...]:
    """A machine for each host of a cluster file, described by the text with its name, else by the one whose name is no
    host's. Raises ConfigError."""
    described = {one.name: one for text in texts for one in _machines(text, base)}
    others = [machine for name, machine in described.items() if name not in hosts]
    missing = [host for host in hosts if host not in described]
    if len(others) > 1 or (missing and not others):
        raise ConfigError(
            f"--machine describes {', '.join(described) or 'none'}, and the cluster's hosts are {', '.join(hosts)}; "
            "allowed: a text for each host by its name, and one with another name for all the rest"
        )
    for host in missing:
        described[host] = replace(others[0], name=host)
    return _checked([described[host] for host in hosts])


def _checked(found: Sequence[Machine]) -> tuple[Machine, ...]:
    names = [one.name for one in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"--machine has two machines called {twice}; give each kind a name of its own")
    if len(found) > MAX_PLANNED_WORKERS:
        raise ConfigError(f"--machine has {len(found)} machines; allowed: 1 to {MAX_PLANNED_WORKERS}")
    return tuple(found)


def _machines(text: str, base: Profile) -> list[Machine]:
    form = _FORM.fullmatch(text)
    if form is None:
        raise ConfigError(f"--machine is {text!r:.200}; allowed: {MACHINE}")
    name, count, rest = form[1], int(form[2] or 1), form[3]
    given = dict(_value(text, part) for part in rest.split())
    if "ram" not in given:
        raise ConfigError(f"--machine {name} has no ram; give it, as ram=32GB")
    disk, memory, link = defaults_of(base)
    memory = given.get("memory", memory)
    if "cores" in given:
        memory = min(memory, given["cores"] * CORE_RATE)
    more = {key.replace("-", "_"): given[key] for key in ("gpu", "gpu-memory", "disk-free") if key in given}
    if "gpu_memory" in more and "gpu" not in more:
        raise ConfigError(f"--machine {name} has gpu-memory and no gpu; give its size, as gpu=8GB")
    kind = (given["ram"], given.get("disk", disk), memory, given.get("net", link))
    return [Machine(name if count == 1 else f"{name} {number}", *kind, **more) for number in range(1, count + 1)]


def _value(text: str, part: str) -> tuple[str, float]:
    key, equals, value = part.partition("=")
    if key not in _KEYS or not equals:
        near = nearest(key, _KEYS) or f"; allowed: {', '.join(f'{known}=' for known in _KEYS)}"
        raise ConfigError(f"--machine {text!r:.200} has {part!r:.40}, which is no KEY=VALUE of a machine{near}")
    parse, allowed = _KEYS[key]
    try:
        return key, parse(value)
    except ValueError:
        raise ConfigError(f"--machine has {part!r:.60}; allowed: {allowed}") from None

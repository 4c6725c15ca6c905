"""Checks of the disk and of the store on it."""

from __future__ import annotations

import statistics
from typing import Any

from odmoe.doctor.machine import Finding, Machine, NotKnownError, Place, State
from odmoe.doctor.software import first_of
from odmoe.machines.preflight import ENVIRONMENT_BYTES, SPARE, place_faults
from odmoe.terminal import megabytes

SLOW = 150e6
"""Bytes a second of a hard disk or a memory card: an SSD reads more."""
UNUSABLE = 0.2
"""Tokens a second with nothing in memory, below which nobody waits for an answer."""
LAG = 1 / 3
"""A disk or a link is slow beside those of other hosts if it reaches less than this share of their median."""
SAME_SIZE = 0.1
"""A host's store is taken for the model's if its size differs by no more than this share from what is needed: its name
follows from the weights, which are not read here."""


def folders(machine: Machine) -> Finding:
    """Whether it can write where it must, and run programs there."""
    machine.known("places")
    return first_of(list(place_faults(machine.facts, machine.wanted.required)), "can be written")


def room(machine: Machine) -> Finding:
    """Free bytes where the store is, or will be."""
    free, needs = machine.known("free"), machine.wanted.needs
    stores = [store for store in (machine.facts.get("stores") or {}).values() if not store["fault"]]
    there = needs is not None and any(
        store.get("held") or abs(store["bytes"] / needs.store - 1) < SAME_SIZE for store in stores
    )
    text = f"{megabytes(free)} free"
    needed = SPARE
    if needs is not None and not there:
        download = needs.download if machine.host is None else 0
        needed += needs.store + download
        needed += ENVIRONMENT_BYTES if machine.place is Place.HOST and machine.facts.get("venv") is None else 0
        text = f"{text}, {megabytes(needed)} needed for the {'download and the ' if download else ''}store"
    if free < needed:
        return Finding(State.FAILURE, f"{text}: the disk is full" if free < SPARE else text)
    return Finding(State.OK, text)


def speed(machine: Machine) -> Finding:
    """How fast experts come from the disk, and how many tokens a second that allows with none in memory."""
    found, needs = machine.known("disk"), machine.wanted.needs
    rate = found["rate"]
    how = "" if found["direct"] else ", through the page cache: it has no O_DIRECT"
    text = f"{rate / 1e9:.2f} GB/s from {found['source']}{how}"
    others = [one["rate"] for one in machine.elsewhere("disk", "worker_node") if "rate" in one]
    if machine.host is not None and machine.host.role != "worker_node":
        return Finding(State.OK, text)  # it loads no experts
    if needs is not None:
        most = (rate + sum(others)) / needs.token
        text = f"{text}: enough for {_tokens(most)} tokens/s with no expert kept in memory"
        if most < UNUSABLE:
            return Finding(State.WARNING, text)
    if rate < SLOW:
        return Finding(State.WARNING, f"{text}, as slow as a hard disk")
    if others and rate < LAG * statistics.median(others):
        return Finding(State.WARNING, f"{text}; other workers' disks reach {statistics.median(others) / 1e9:.2f} GB/s")
    return Finding(State.OK, text)


def _tokens(rate: float) -> str:
    return f"{rate:.2g}" if rate < 10 else f"{rate:,.0f}"


def store(machine: Machine) -> Finding:
    """Stores there, whether they are whole, and whether one is missing that the cluster uses."""
    stores: dict[str, Any] = machine.known("stores")
    damaged = [f"{name}: {found['fault']}" for name, found in stores.items() if found["fault"]]
    if damaged:
        return Finding(State.FAILURE, "; ".join(damaged), _anew(machine))
    missing = _wanted_stores(machine) - stores.keys()
    if missing:
        return Finding(State.FAILURE, f"missing: {', '.join(sorted(missing))}, which other hosts have", _anew(machine))
    bad = [f"{name}: {why}" for name, why in (machine.facts.get("verified") or {}).items() if why]
    if bad:
        return Finding(State.FAILURE, "; ".join(bad), _anew(machine))
    if not stores:
        made = "odmoe up brings it" if machine.host else "the first run makes it"
        return Finding(State.OK, f"none yet; {made}")
    deep = "every byte is right" if machine.facts.get("verified") else "sizes are right; --deep reads every byte"
    if machine.facts.get("verified") is None and machine.facts.get("verify_fault"):
        raise NotKnownError(str(machine.facts["verify_fault"]))
    size = sum(found["bytes"] for found in stores.values())
    name = next(iter(stores)) if len(stores) == 1 else f"{len(stores)} stores"
    parts = [found["held"] for found in stores.values() if found.get("held")]
    if parts and len(stores) == 1:
        name += ", {} of {} experts".format(*parts[0])
    return Finding(State.OK, f"{name}, {megabytes(size)}; {deep}")


def _wanted_stores(machine: Machine) -> set[str]:
    """Those of the cluster's claim, or those that most hosts have."""
    if machine.host is None:
        return set()
    claimed = set((machine.facts.get("owner") or {}).get("stores", ()))
    everybody = machine.elsewhere("stores")
    names = {name for found in everybody for name in found}
    return claimed | {name for name in names if sum(name in found for found in everybody) > len(everybody) / 2}


def _anew(machine: Machine) -> str:
    if machine.host is None:
        return "odmoe rm NAME removes it, and the next run makes it again"
    return f"odmoe up {machine.wanted.cluster.path if machine.wanted.cluster else ''} -m MODEL copies it again"

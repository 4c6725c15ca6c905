"""Checks of what is installed: Python, packages, our code, commands, and what runs already."""

from __future__ import annotations

import re

from odmoe.doctor.machine import Finding, Machine, Place, State
from odmoe.machines.owners.ownership import faults as owner_faults
from odmoe.machines.preflight import OLDEST, environment_faults, python_unlike, version_faults

ASKED = "odmoe.at_head"  # the launching machine's request, not a node
NAMED = 3


def first_of(faults: list[tuple[str, str]], value: str) -> Finding:
    """A failure with all causes, or ok with `value`. `faults`: (cause, advice)."""
    if not faults:
        return Finding(State.OK, value)
    causes, advice = zip(*faults, strict=True)
    return Finding(State.FAILURE, "; ".join(causes), "; ".join(dict.fromkeys(advice)))


def python(machine: Machine) -> Finding:
    facts = machine.facts
    version = str((facts.get("venv") or facts)["python"]) if machine.place is Place.HOST else str(facts["python"])
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
        return Finding(State.FAILURE, f"{version}; 3.11 or newer is needed")
    return first_of(list(python_unlike(facts, machine.main or facts)) if machine.host else [], version)


def packages(machine: Machine) -> Finding:
    """Against requirements.lock, of those that pyproject.toml names."""
    required = machine.wanted.required.versions
    if not required:
        return Finding(State.UNKNOWN, "there is no requirements.lock beside the code")
    if machine.host is None:
        faults = list(version_faults(machine.wanted.packages, required))
        if faults:
            return Finding(State.WARNING, faults[0][0].replace(" in ~/odmoe/venv", ""), "make env")
        return Finding(State.OK, f"all {len(required)} as in requirements.lock")
    venv = machine.known("venv")
    if venv is None:
        faults = list(environment_faults(machine.facts, to_be_made=True))
        return first_of(faults, "none yet; odmoe up installs them")
    return first_of(list(version_faults(venv["packages"], required)), f"all {len(required)} as in requirements.lock")


def code(machine: Machine) -> Finding:
    """Our own code there beside that of this machine, by digest."""
    has, wanted = machine.known("code"), machine.wanted.code
    if not has:
        return Finding(State.OK, "none yet; odmoe up brings it")
    if not wanted:
        return Finding(State.UNKNOWN, "the code here has no digest")
    if has != wanted:
        return Finding(State.WARNING, f"{has[:12]}, this machine has {wanted[:12]}")
    return Finding(State.OK, f"{has[:12]}, as here")


def commands(machine: Machine) -> Finding:
    found = machine.known("commands")
    missing = [name for name, path in found.items() if not path]
    if missing and machine.place is Place.ALONE:
        return Finding(State.WARNING, f"missing: {', '.join(missing)}; only a cluster needs them")
    if missing:
        return Finding(State.FAILURE, f"missing: {', '.join(missing)}")
    return Finding(State.OK, ", ".join(found))


def kernel(machine: Machine) -> Finding:
    found = machine.known("kernel")
    testbed = "" if found["namespaces"] else "; no namespaces, which only the testbed needs"
    return Finding(State.OK, f"Linux {found['release']}{testbed}")


def open_files(machine: Machine) -> Finding:
    soft, hard = machine.known("files")
    if hard < 4096:
        return Finding(State.WARNING, f"at most {hard} open files for a process; 4096 or more are needed under load")
    return Finding(State.OK, f"{soft:,} (at most {hard:,}) for a process")


def node(machine: Machine) -> Finding:
    """Another cluster on the host, or a node that is down while the cluster runs."""
    owner = list(owner_faults(machine.facts, machine.wanted.required.cluster_id or "", take_over=False))
    if owner:
        return first_of(owner, "")
    running = [name for name in machine.known("processes") if name != ASKED]
    cluster_runs = any(name != ASKED for name in (machine.main or {}).get("processes", ()))
    if running:
        more = f" and {len(running) - NAMED} more" if len(running) > NAMED else ""
        return Finding(State.OK, f"runs: {', '.join(running[:NAMED])}{more}")
    if cluster_runs:
        return Finding(State.FAILURE, "its node is down, though the cluster runs")
    return Finding(State.OK, "nothing runs yet")

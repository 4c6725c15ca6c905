"""Checks of processor, GPU and memory."""

from __future__ import annotations

import re
from typing import Any

from odmoe.doctor.machine import Finding, Machine, Place, State
from odmoe.doctor.needs import RAY_BYTES
from odmoe.doctor.software import first_of
from odmoe.machines.preflight import processor_unlike
from odmoe.terminal import megabytes

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""The oldest driver of NVIDIA for each major version of CUDA."""
SWAPPED = 1 << 30
"""Bytes in the swap from which memory has been short."""
NAMES = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 bf16", "amx_bf16": "AMX", "asimd": "NEON"}
"""Instruction sets on which the order of sums, and so the last bits of a result, depends."""


def processor(machine: Machine) -> Finding:
    """Its instruction sets, and whether they are those of the main host."""
    found = machine.known("processor")
    sets = _sets(found)
    text = f"{found['name']}; {', '.join(sets) or 'none of AVX2, AVX-512 and AMX'}"
    main = (machine.main or {}).get("processor") if machine.host else None
    if main is None:
        slow = found["machine"] == "x86_64" and "avx2" not in found["flags"]
        return Finding(State.WARNING, f"{text}; without AVX2 it is slow") if slow else Finding(State.OK, text)
    faults = list(processor_unlike(machine.facts, machine.main or {}))
    if faults or sets == _sets(main):
        return first_of(faults, text)
    return Finding(
        State.WARNING,
        f"{text}; the main host has {', '.join(_sets(main)) or 'none of these'}, so results may differ in last bits",
    )


def _sets(found: dict[str, Any]) -> list[str]:
    return [text for flag, text in NAMES.items() if flag in found["flags"]]


def cores(machine: Machine) -> Finding:
    found = machine.known("processor")
    usable, everything = found["threads"], found["all_threads"]
    text = f"{found['cores']} cores, {everything} threads" if found["cores"] else f"{everything} threads"
    if usable < everything:
        return Finding(State.OK, f"{text}, of which {usable} may be used here")
    return Finding(State.OK, text)


def gpu(machine: Machine) -> Finding:
    """The GPUs of the machine beside what torch can use of them."""
    names, library, driver = machine.known("gpus"), machine.facts.get("library") or {}, machine.facts.get("driver")
    if not names and not library.get("gpus"):
        return Finding(State.OK, "none; the processor computes")
    if "fault" in library or not library:
        return Finding(State.UNKNOWN, f"{', '.join(names)}; {library.get('fault') or 'torch was not asked'}")
    if not library["cuda"]:
        cure = "install torch's build for CUDA in the environment; on the processor all works without it"
        return Finding(State.WARNING, f"{', '.join(names)}, but torch {library['torch']} is built without CUDA", cure)
    if not library["gpus"]:
        least = OLDEST_DRIVER.get(int(library["cuda"].split(".")[0]))
        needs = f"; it needs {least} or newer" if least else ""
        return Finding(
            State.FAILURE,
            f"{', '.join(names)}, but torch for CUDA {library['cuda']} finds none; the driver is "
            f"{driver or 'unknown'}{needs}",
        )
    unfit = [one for one in library["gpus"] if library["levels"] and not _has_kernels(one["level"], library["levels"])]
    if unfit:
        cure = "use the processor there (--device cpu), or an older torch that still has them"
        return Finding(State.FAILURE, f"torch has no code for {unfit[0]['name']} ({unfit[0]['level']})", cure)
    texts = [f"{one['name']}, {megabytes(one['free'])} of {megabytes(one['total'])} free" for one in library["gpus"]]
    return Finding(State.OK, f"{'; '.join(texts)}; CUDA {library['cuda']}, driver {driver or 'unknown'}")


def _has_kernels(level: str, built: list[str]) -> bool:
    """Code for an earlier level of the same major number runs; so does the portable form (compute_) of any earlier."""
    has = _level(level)
    return any(_level(one) <= has and (one.startswith("compute_") or _level(one) // 10 == has // 10) for one in built)


def _level(text: str) -> int:
    return int(re.sub(r"\D", "", text) or 0)


def memory(machine: Machine) -> Finding:
    """What is free beside what the machine's nodes need of the model."""
    found = machine.known("ram")
    free = min(found["available"], found["total"] if found["left"] is None else found["left"])
    text, needs = f"{megabytes(free)} of {megabytes(found['total'])} free", machine.wanted.needs
    if needs is None:
        return Finding(State.WARNING if free < RAY_BYTES else State.OK, text, "close other programs")
    if machine.host is not None and machine.facts.get("processes"):
        free, text = found["total"], f"{text}, while its node runs"
    if machine.place is Place.ALONE:
        return _memory_alone(free, text, needs.memory, needs.shadow)
    role = machine.host.role if machine.host else "main_node"
    needed = needs.memory[role] + RAY_BYTES
    text = f"{text}, {megabytes(needed)} needed for {_ROLES[role]}"
    return Finding(State.OK if free >= needed else State.FAILURE, text, _CURES[role])


_ROLES = {"main_node": "the main node", "shadow_node": "the shadow", "worker_node": "a worker with one expert"}
_LESS = "close other programs there, or give this role to a host with more memory"
_CURES = {
    "main_node": _LESS,
    "shadow_node": f"{_LESS}; --shadow nf4 needs least",
    "worker_node": f"{_LESS}; --experts int4 makes experts smaller",
}


def _memory_alone(free: int, text: str, roles: dict[str, int], shadow: str) -> Finding:
    least = roles["main_node"] + roles["worker_node"]
    whole = least + roles["shadow_node"]
    if free < least:
        cure = "close other programs, choose a smaller model, or store it in few bits: --experts int4 --dense int4"
        return Finding(State.FAILURE, f"{text}, {megabytes(least)} needed at least", cure)
    if free < whole:
        return Finding(
            State.WARNING,
            f"{text}: enough for the model ({megabytes(least)}, and more to keep experts), but not for its shadow, the "
            f"copy that predicts ({megabytes(roles['shadow_node'])} more in {shadow})",
            "run it without a shadow: --system lrfu-prefetch",
        )
    return Finding(State.OK, f"{text}, {megabytes(whole)} needed, {_shadow_text(shadow)}")


def _shadow_text(shadow: str) -> str:
    return "without a shadow" if shadow == "none" else f"with the shadow ({shadow})"


def container(machine: Machine) -> Finding:
    """A limit of the control group, such as a container's."""
    found = machine.known("ram")
    if found["limit"] is None or found["limit"] >= found["total"]:
        return Finding(State.OK, "no limit of memory")
    text = f"limited to {megabytes(found['limit'])} of memory, {megabytes(found['left'])} of it left"
    return Finding(State.WARNING if found["left"] < RAY_BYTES else State.OK, text)


def swap(machine: Machine) -> Finding:
    found = machine.known("ram")
    used = found["swap_total"] - found["swap_free"]
    if not found["swap_total"]:
        return Finding(State.OK, "none")
    text = f"{megabytes(used)} of {megabytes(found['swap_total'])} used"
    return Finding(State.WARNING if used > SWAPPED else State.OK, text)

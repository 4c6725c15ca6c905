"""Advice for machines as text, and as the object that `odmoe plan --machine --json` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from odmoe.commands.texts.plan_text import table, wrap
from odmoe.terminal import count_text, megabytes
from scheduler.planning.machine_plan import LEAST_RATES, LEAST_ROUTES, MOST_ROUTES, Improvement, MachineAdvice
from scheduler.planning.machines import ALL, BUS_RATE, CACHE, NODE_BYTES, Layout, Machine, Place
from scheduler.simulation.route_model import LIKE_TEXT

_ROLES = {"main": "main node", "shadow": "shadow", "worker": "experts", "node": "processes"}


def advice_text(advice: MachineAdvice) -> str:
    """The answer in words, what it takes of each machine, and how to run it."""
    sentence = [*_answer(advice), *([f"Does not fit: {'; '.join(advice.unfit)}"] if advice.unfit else [])]
    tried = {"tried": "; ".join(f"{_layout(one)}: {rate:.2f} tokens/s" for one, rate in advice.tried.items())}
    lines = [*wrap(". ".join(sentence) + "."), "", *table(_memory(advice) | tried), "", "To run it:", ""]
    return "\n".join([*lines, *(part for line in _commands(advice) for part in wrap(line, "  ", "      ")), ""])


def improvements_text(advice: MachineAdvice, changes: Sequence[Improvement]) -> str:
    """What would help, and what was taken for granted."""
    lines = ["Nothing that was tried would help."]
    if changes:
        lines = wrap(f"What would help most: {changes[0].what}, for {changes[0].tokens_per_s:.2f} tokens/s.")
        lines += ["", "Single changes, in tokens/s:"]
        for one in changes:
            lines += wrap(one.what, f"  {one.tokens_per_s:>7.2f}  {one.factor - 1:>+6.0%}  ")
    lines += ["", "Assumed, because not given:"]
    return "\n".join([*lines, *(part for line in assumed(advice) for part in wrap(line, "  ", "    "))])


def as_dict(advice: MachineAdvice, changes: Sequence[Improvement]) -> dict[str, Any]:
    """docs/reports.md explains the fields."""
    layout = advice.layout
    return {
        "system": layout.preset,
        "residency": _residency(layout),
        "machines": [one.name for one in layout.machines],
        "main": _place(layout.main),
        "shadow": {**_place(layout.shadow), "scheme": layout.scheme} if layout.shadow else None,
        "workers": [
            {**_place(seat.place), "slots": seat.slots, "host_slots": seat.host_slots} for seat in layout.seats
        ],
        "replicas": layout.replicas,
        "disk_bytes": layout.disk(),
        "decode_tokens_per_s": advice.tokens_per_s,
        "decode_tokens_per_s_range": [advice.least, advice.most],
        "one_machine_tokens_per_s": advice.alone[1] if advice.alone else advice.tokens_per_s,
        "memory_bytes": layout.memory(),
        "memory_used_share": advice.used_bytes / advice.given_bytes,
        "experts_with_slots_share": advice.cached,
        "store_bytes": layout.model.store_bytes,
        "tried": [{"what": _layout(one), "tokens_per_s": rate} for one, rate in advice.tried.items()],
        "does_not_fit": list(advice.unfit),
        "helps_most": changes[0]._asdict() if changes else None,
        "changes": [one._asdict() for one in changes],
        "assumed": assumed(advice),
        "model": dataclasses.asdict(layout.model) | {"expert_bytes": layout.model.expert_bytes},
    }


def _answer(advice: MachineAdvice) -> Iterator[str]:
    layout = advice.layout
    shadow = f", the shadow ({layout.scheme}) on {_where(layout.shadow)}" if layout.shadow else ""
    on = f"the main node on {_where(layout.main)}{shadow}, experts on {_group(layout)}"
    used = count_text(len(layout.machines), "machine")
    idle = len(advice.home.machines) - len(layout.machines)
    others = count_text(idle, "machine")
    if len(layout.machines) == 1:
        on = _where(layout.main) if layout.main == layout.seats[0].place else on
        yield f"Run {_system(layout)} on {on}" + (f"; the other {others} would not make it faster" if idle else "")
    else:
        left = f"; {others} more would not make it faster" if idle else ""
        yield f"Run {_system(layout)} on {used}: {on}{left}"
    yield f"Expect {advice.tokens_per_s:.2f} tokens/s ({advice.least:.2f} to {advice.most:.2f})"
    if advice.alone:
        yield f"One machine alone, {advice.alone[0].machines[0].name}, would reach {advice.alone[1]:.2f}"
    experts = megabytes(layout.model.store_bytes)
    if layout.keeps == ALL:
        yield f"All {experts} of experts stay in memory"
    elif layout.keeps == CACHE:
        add_up = "; the machines' caches add up" if len(layout.seats) > 1 else ""
        yield f"Memory holds {advice.cached:.0%} of the {experts} of experts, as a cache{add_up}"
    held = sum(seat.host_slots for seat in layout.seats) / layout.experts
    if held:
        yield f"Beside that, host memory holds {min(held, 1.0):.0%} of them between disk and GPU"
    if layout.replicas is not None:
        sizes = layout.disk()
        yield (
            f"Let {layout.replicas} workers have each expert (replicas: {layout.replicas}): a worker's disk then needs "
            f"{megabytes(sizes[layout.parted[0].name])} in place of {megabytes(sizes[layout.main.machine.name])}"
        )
    yield (
        f"That takes {megabytes(advice.used_bytes)} of the {megabytes(advice.given_bytes)} given "
        f"({advice.used_bytes / advice.given_bytes:.0%})"
    )


def _memory(advice: MachineAdvice) -> dict[str, str]:
    """A line a machine; those that are alike share one."""
    memory, slots = advice.layout.memory(), {seat.place.machine.name: seat.slots for seat in advice.layout.seats}
    lines: dict[str, list[str]] = {}
    for name, roles in memory.items():
        parts = [f"{_ROLES[role]} {megabytes(roles[role])}" for role in _ROLES if role in roles]
        parts += [f"slots: {slots[name]}"] if name in slots else []
        lines.setdefault(", ".join(parts), []).append(name)
    return {_names(names): text for text, names in lines.items()} | {"disks": _disks(advice.layout)}


def _disks(layout: Layout) -> str:
    """What the store takes on them."""
    parted = [one.name for one in layout.parted] if layout.replicas is not None else []
    sizes = layout.disk()
    whole = [name for name in sizes if name not in parted]
    text = f"{_names(whole)}: {megabytes(sizes[whole[0]])}, the whole store"
    return f"{text}; {_names(parted)}: {megabytes(sizes[parted[0]])}, a part each" if parted else text


def _commands(advice: MachineAdvice) -> Iterator[str]:
    layout, seats = advice.layout, advice.layout.seats
    flags = " --main-device cuda" if layout.main.on_gpu else ""
    on_gpu = [seat.place.machine.name for seat in seats if seat.place.on_gpu]
    held = [seat.place.machine.name for seat in seats if seat.host_slots >= layout.experts]
    flags += " --worker-device cuda" if len(on_gpu) == len(seats) else ""
    flags += " --loader cuda" if len(held) == len(seats) else ""
    flags += f" --kv-memory {layout.kept / 1e9:g}GB" if layout.kept else ""
    flags += " --kernel fast" if layout.model.native_bits or layout.model.dense_saved else ""
    if len(layout.machines) == 1:
        room = layout.slots * layout.model.expert_bytes / 1e9
        memory = "" if layout.keeps == ALL else f" --device-memory {room:.1f}GB"
        other = f" --residency {layout.eviction}" if layout.keeps == CACHE and layout.eviction != "lrfu" else ""
        yield f"odmoe serve -m MODEL --system {layout.preset}{other} --workers 1{memory}{flags}"
        return
    system = f"--system {layout.preset}" + (f" --residency {layout.eviction}" if layout.keeps == CACHE else "")
    system += f" --shadow {layout.scheme}" if layout.shadow else ""
    group = min(layout.model.top_k, len(seats))
    yield f"odmoe serve -m MODEL --cluster FILE.yaml {system} --group-size {group}{flags}"
    yield "with slots: N of each worker in the cluster file, as above"
    for line, names in (("device: cuda", on_gpu), ("loader: cuda", held)):
        if 0 < len(names) < len(seats):
            yield f"and {line} of {_names(names)} alone"
    two_roles = any(seat.place.machine == layout.main.machine for seat in seats)
    if layout.replicas is not None and not two_roles:
        yield f"and replicas: {layout.replicas} in its provider block"
    elif layout.replicas is not None:
        yield f"odmoe shard MODEL STORE --parts {len(layout.parted)} --replicas {layout.replicas}"
        yield f"and a part to each of {_names([one.name for one in layout.parted])}, as in docs/lan.md"
    if two_roles:
        yield (
            "A cluster file gives each role a host of its own. For a machine with two roles start Ray by hand, as in "
            'docs/running.md, with --resources=\'{"main_node": 1, "worker_node": 1}\', and give --cluster HEAD:6379'
        )


def assumed(advice: MachineAdvice) -> list[str]:
    """What was not given, and where it is from."""
    base, layout = advice.home.base, advice.layout
    found = [
        f"times: those of {base.name}, with the part that moves bytes scaled to the model and the machines",
        *_machine_lines(advice.home.machines),
        f"range: from routes that are {LEAST_ROUTES} on machines with {LEAST_RATES:.0%} of these rates, to routes like "
        f"those of models/{MOST_ROUTES}; the figure itself is for routes like those of models/{LIKE_TEXT}",
        f"memory: 5 % of a machine's, at least 0.4 GB, is left to its system, and {megabytes(NODE_BYTES)} to processes",
        "prefetches of lrfu-prefetch are not simulated: what they gain comes on top",
    ]
    if any(seat.host_slots for seat in layout.seats):
        found.append(f"loads from host memory to a GPU: {BUS_RATE / 1e9:g} GB/s")
    if any(one.gpu for one in layout.machines):
        found.append("GPUs: this version has not been run on one yet (docs/devices.md)")
    return found


def _machine_lines(machines: Sequence[Machine]) -> Iterator[str]:
    kinds: dict[str, list[str]] = {}
    for one in machines:
        gpu = f", GPU memory at {one.gpu_memory / 1e9:g} GB/s" if one.gpu else ""
        text = (
            f"disk {one.disk / 1e9:.3g} GB/s, memory {one.memory / 1e9:.3g} GB/s, link {one.link / 1e9:g} Gbit/s{gpu}"
        )
        kinds.setdefault(text, []).append(one.name)
    for text, names in kinds.items():
        yield f"{_names(names)}: {text}"


def _system(layout: Layout) -> str:
    named = layout.preset == "lrfu-prefetch" and layout.eviction == "lrfu"
    return f"{layout.preset} with an {layout.eviction} cache" if layout.keeps == CACHE and not named else layout.preset


def _layout(layout: Layout) -> str:
    """In a word or two."""
    main, experts = (_device(place) for place in (layout.main, layout.seats[0].place))
    on = main if main == experts else f"{main} and {experts}"
    shadow = f", shadow {layout.scheme}" if layout.shadow else ""
    parts = "" if layout.replicas is None else f", replicas: {layout.replicas}"
    return f"{_system(layout)} on {count_text(len(layout.machines), 'machine')} ({on}{shadow}{parts})"


def _device(place: Place) -> str:
    return "GPU" if place.on_gpu else "CPU"


def _residency(layout: Layout) -> str:
    if layout.keeps == ALL:
        return "all"
    return layout.system.residency


def _place(place: Place) -> dict[str, str]:
    return {"machine": place.machine.name, "device": "gpu" if place.on_gpu else "cpu"}


def _where(place: Place | None) -> str:
    return f"{place.machine.name}'s {'GPU' if place.on_gpu else 'processor'}" if place else ""


def _group(layout: Layout) -> str:
    gpus = [seat.place.machine.name for seat in layout.seats if seat.place.on_gpu]
    cpus = [seat.place.machine.name for seat in layout.seats if not seat.place.on_gpu]
    parts = [f"the GPU{'s' * (len(gpus) > 1)} of {_names(gpus)}"] if gpus else []
    parts += [f"the processor{'s' * (len(cpus) > 1)} of {_names(cpus)}"] if cpus else []
    return " and ".join(parts)


def _names(names: Sequence[str]) -> str:
    """`pc 1 to 8`, `pc 1, mini`."""
    first, last = names[0], names[-1]
    stem = first.rpartition(" ")[0]
    if len(names) > 2 and stem and all(name.rpartition(" ")[0] == stem for name in names):
        return f"{first} to {last.rpartition(' ')[2]}"
    return ", ".join(names)

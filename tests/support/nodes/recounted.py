"""Hits counted again from a recording, with no code of the scheduler's: what lay in which slot, and in which form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler import types as t
from scheduler.eventlog.recording import Recording

Needs = Callable[[t.GateFired], dict[int, set[str]]]
"""For each chosen expert of a decode pass of one row, the forms that serve."""


def _hobbit(gate: t.GateFired) -> dict[int, set[str]]:
    """Full where the better choices have at most 0.6 of the row's weight; else int4 will do, too."""
    [chosen], [scores] = gate.chosen, gate.scores
    total, better, found = sum(scores[e] for e in chosen), 0.0, {}
    for expert in sorted(chosen, key=lambda e: (-scores[e], e)):
        found[expert] = {""} if better / total <= 0.6 else {"", "int4"}
        better += scores[expert]
    return found


def _fate(gate: t.GateFired) -> dict[int, set[str]]:
    """In decoding int4, or full."""
    return {expert: {"", "int4"} for expert, _ in gate.rows}


NEEDS: dict[str, Needs] = {"hobbit": _hobbit, "fate": _fate}


@dataclass
class Hits:
    """Of one request, in decoding. `wrong_form`: experts that lay there in a form that does not serve."""

    named: int = 0
    hits: int = 0
    wrong_form: int = 0


def hits_of(recording: Recording, needs: Needs) -> list[Hits]:
    """By request, in the order of their opening. For requests one after the other, and one row a pass."""
    slots: dict[tuple[int, int], t.Load] = {}
    loaded: set[int] = set()
    leaving: dict[int, tuple[int, int]] = {}
    found: dict[int, Hits] = {}
    prefilling: set[int] = set()
    for (_, event), commands in zip(recording.events, recording.commands, strict=True):
        if isinstance(event, t.RequestOpened):
            found[event.request] = Hits()
        elif isinstance(event, t.StepStarted):
            prefilling = {one.request for one in event.passes if one.prefill}
        elif isinstance(event, t.LoadEnded):
            loaded.add(event.load_id)
        elif isinstance(event, t.ComputeEnded) and event.call_id in leaving:
            slots.pop(leaving.pop(event.call_id), None)
        elif isinstance(event, t.GateFired) and event.visit.request not in prefilling:
            held = {load.expert: load.form for load in slots.values() if load.load_id in loaded}
            for expert, forms in needs(event).items():
                form = held.get(t.ExpertId(event.visit.layer, expert))
                one = found[event.visit.request]
                one.named += 1
                one.hits += form in forms
                one.wrong_form += form is not None and form not in forms
        for command in commands:
            if isinstance(command, t.Load):
                slots[command.worker, command.slot] = command
            elif isinstance(command, t.Evict):
                slots.pop((command.worker, command.slot), None)
            elif isinstance(command, t.Compute) and command.evict:
                leaving[command.call_id] = command.worker, command.slot
    return list(found.values())

"""The routes and predictions of a recorded run, as workloads for the simulator."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from scheduler import types as t
from scheduler.eventlog.recording import Recording
from scheduler.policies.registry import strategy_of
from scheduler.simulation.workload import Gate, Rows, mistaken


@dataclass(slots=True)
class RecordedWorkload:
    """One recorded request, of `tokens` tokens; see `Workload`."""

    number: int
    prompt_tokens: int
    experts: int
    prefill: list[list[Rows]] = field(default_factory=list)
    """By pass over the prompt, by layer."""
    passes: list[list[tuple[int, ...]]] = field(default_factory=list)
    predictions: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    replaced: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """Of the predictions, those that were others at first: what the shadow predicted ahead of an alignment."""
    ttft_s: float = 0.0
    """Recorded time from the start of prefill to its last answer, by the main node's clock."""
    decode_s: float = 0.0
    """Recorded time from the start of the first decode pass to the last answer of the last one."""
    recall: float | None = None
    """If given, predictions are drawn at random with this recall, in place of the recorded ones."""
    seed: int = 0
    foresight: str | None = None
    gates: dict[tuple[int, int], Gate] = field(default_factory=dict)
    """(index, layer), with index -1, -2, ... for the passes over the prompt -> the gate's scores and what followed from
    them."""
    chunks: tuple[int, ...] = ()
    """Tokens of each pass over the prompt; empty: one for all."""
    group: int = 0
    """Requests of the same group were in steps together, if only with others between them."""
    step: int = 0
    """The first step that it was in, counted from 0 among those of its group."""

    @property
    def tokens(self) -> int:
        """Tokens of the answer; if it was interrupted, those with a complete pass."""
        return 1 + len(self.passes)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """As recorded."""
        return len(self.passes) / self.decode_s if self.passes and self.decode_s > 0 else None

    @property
    def scored(self) -> bool:
        """Whether every gate's scores were recorded."""
        layers, count = len(self.prefill[0]), len(self.prefill)
        keys = ((index, layer) for index in range(-count, len(self.passes)) for layer in range(layers))
        return all(key in self.gates and bool(self.gates[key].scores) for key in keys)

    def gate(self, index: int, layer: int) -> Gate:
        return self.gates[index, layer]

    def prompt(self, layer: int, start: int = 0, stop: int | None = None) -> Rows:
        """Of whole passes over the prompt."""
        ends = list(itertools.accumulate(self.chunks)) or [self.prompt_tokens]
        counts: Counter[int] = Counter()
        for begin, end, rows in zip([0, *ends], ends, self.prefill, strict=False):
            if start <= begin and (stop is None or end <= stop):
                counts.update(dict(rows[layer]))
        return tuple(sorted(counts.items()))

    def routes(self, index: int, layer: int) -> tuple[int, ...]:
        return self.passes[index][layer]

    def predict(self, index: int, layer: int) -> tuple[int, ...] | None:
        """As recorded; or, if `recall` is given, drawn at random for the recorded routes."""
        if self.recall is None:
            return self.predictions.get((index, layer))
        draw: Callable[[], float] = Random(f"{self.seed} {self.number} {index} {layer}").random
        return mistaken(draw, self.passes[index][layer], self.experts, self.recall)

    def same_token(self, index: int) -> bool:
        """A recording does not have the shadow's tokens. Another one shows in `replaced`."""
        return True

    def ahead(self, index: int, layer: int, same: bool) -> tuple[int, ...] | None:
        """What was predicted first. After a late departure that is what was predicted last, too."""
        before = self.replaced.get((index, layer)) if self.recall is None else None
        return self.predict(index, layer) if before is None else before

    def misled(self, index: int, layer: int) -> tuple[int, ...]:
        """No token is another."""
        return self.routes(index, layer)


def recorded_workloads(recording: Recording) -> list[RecordedWorkload]:
    """Every request with a complete prefill, in the order in which they were opened. The first incomplete pass, and all
    after it, are left out."""
    readers: dict[int, _Reader] = {}
    found: list[_Reader] = []
    steps = _Steps()
    for (now, event), commands in zip(recording.events, recording.commands, strict=True):
        if isinstance(event, t.RequestOpened):
            readers[event.request] = _Reader(recording.core_config.shape, event)
            found.append(readers[event.request])
        for command in commands:
            if isinstance(command, t.Resume) and command.visit.request in readers:
                readers[command.visit.request].resumed(command.visit, now)
        if isinstance(event, t.StepStarted):
            steps.add([readers[begun.request] for begun in event.passes if begun.request in readers])
            for begun in event.passes:
                if begun.request in readers:
                    readers[begun.request].began(begun, now)
        if isinstance(event, t.GateFired | t.Predicted | t.Foreseen):
            number = event.visit.request if isinstance(event, t.GateFired) else event.request
            if number in readers:
                readers[number].take(event, now)
    whole = {reader: one for reader in found if (one := reader.workload()) is not None}
    foresight = strategy_of(recording.core_config.shape, recording.core_config.system).predictor.foresight
    for reader, one in whole.items():
        one.foresight = foresight
        one.group, one.step = steps.place(reader)
    return list(whole.values())


def recorded_groups(workloads: list[RecordedWorkload]) -> list[list[RecordedWorkload]]:
    """Those that were in steps together, in the order of their first steps."""
    groups: dict[int, list[RecordedWorkload]] = {}
    for one in workloads:
        groups.setdefault(one.group, []).append(one)
    return [sorted(group, key=lambda one: one.step) for group in groups.values()]


class _Steps:
    """The steps of a recording, by the readers of their requests."""

    def __init__(self) -> None:
        self._steps: list[list[_Reader]] = []
        self._groups: dict[_Reader, list[_Reader]] = {}

    def add(self, readers: list[_Reader]) -> None:
        """The next step."""
        self._steps.append(readers)
        groups = {id(group): group for one in readers if (group := self._groups.setdefault(one, [one]))}
        together = [one for group in groups.values() for one in group]
        self._groups |= dict.fromkeys(together, together)

    def place(self, reader: _Reader) -> tuple[int, int]:
        """A number of its group, and its first step, counted from 0 among those of its group."""
        group = self._groups[reader]
        steps = [step for step in self._steps if any(one in group for one in step)]
        return id(group), next(number for number, step in enumerate(steps) if reader in step)


class _Reader:
    """Collects one request's events. `_gates`: (position, ordinal) -> rows. `_ends`: position -> time of its last
    answer. `_gate_events`: (position, ordinal) -> its gate. `_foreseen`: (position, ordinal) -> the scores that
    followed its gate."""

    def __init__(self, shape: t.ModelShape, opened: t.RequestOpened) -> None:
        self._shape = shape
        self._opened = opened
        self._ordinal = {layer: ordinal for ordinal, layer in enumerate(shape.layers)}
        self._gates: dict[tuple[int, int], Rows] = {}
        self._predictions: dict[tuple[int, int], tuple[int, ...]] = {}
        self._replaced: dict[tuple[int, int], tuple[int, ...]] = {}
        self._gate_events: dict[tuple[int, int], t.GateFired] = {}
        self._foreseen: dict[tuple[int, int], list[t.Foreseen]] = {}
        self._last = (0, 0)
        self._chunks: dict[int, int] = {}  # position -> tokens of each pass over the prompt, in their order
        self._from: dict[bool, float] = {}  # when prefill, and the first pass of decoding, began
        self._ends: dict[int, float] = {}

    def began(self, one: t.Pass, now: float) -> None:
        self._from.setdefault(one.prefill, now)
        if one.prefill:
            self._chunks[one.position] = one.tokens

    def take(self, event: t.GateFired | t.Predicted | t.Foreseen, now: float) -> None:
        if isinstance(event, t.GateFired):
            self._last = event.visit.position, self._ordinal[event.visit.layer]
            self._gates[self._last] = event.rows
            self._gate_events[self._last] = event
        elif isinstance(event, t.Foreseen):
            self._foreseen.setdefault(self._last, []).append(event)
        else:
            index = event.position - self._opened.prompt_tokens
            key = index, self._ordinal[event.layer]
            if key in self._predictions:
                self._replaced.setdefault(key, self._predictions[key])
            self._predictions[key] = event.experts

    def _index(self, position: int) -> int:
        """The index of a decode pass; -1, -2, ...: of one over the prompt."""
        if position >= self._opened.prompt_tokens:
            return position - self._opened.prompt_tokens
        return -1 - list(self._chunks).index(position) if position in self._chunks else -1

    def resumed(self, visit: t.Visit, now: float) -> None:
        if visit.layer == self._shape.layers[-1]:
            self._ends[visit.position] = now

    def workload(self) -> RecordedWorkload | None:
        first = self._opened.prompt_tokens
        prefill = [rows for position in self._chunks if (rows := self._rows(position)) is not None]
        if len(prefill) < len(self._chunks) or sum(self._chunks.values()) != first or first < 1:
            return None
        one = RecordedWorkload(self._opened.request, first, self._shape.experts, prefill)
        one.chunks = tuple(self._chunks.values())
        while (rows := self._rows(first + len(one.passes))) is not None:
            one.passes.append([tuple(expert for expert, _ in of_layer) for of_layer in rows])
        one.predictions = {key: experts for key, experts in self._predictions.items() if key[0] < len(one.passes)}
        one.replaced = {key: experts for key, experts in self._replaced.items() if key in one.predictions}
        for (position, layer), event in self._gate_events.items():
            if (index := self._index(position)) < len(one.passes):
                seen = self._foreseen.get((position, layer), ())
                foreseen = [(self._index(e.position), self._ordinal[e.layer], e.scores) for e in seen]
                one.gates[index, layer] = Gate(event.chosen, event.scores, tuple(foreseen))
        last_chunk = self._ends[list(self._chunks)[-1]]
        one.ttft_s = last_chunk - self._from[True]
        if one.passes and False in self._from:
            one.decode_s = self._ends[first + len(one.passes) - 1] - self._from[False]
        return one

    def _rows(self, position: int) -> list[Rows] | None:
        """The rows of every layer of a pass; None if the pass is incomplete."""
        found = [self._gates.get((position, layer)) for layer in range(len(self._shape.layers))]
        rows = [one for one in found if one is not None]
        return rows if position in self._ends and len(rows) == len(found) else None

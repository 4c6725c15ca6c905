"""The routes and predictions of a recorded run, as workloads for the simulator."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import get_args

from scheduler import types as t
from scheduler.eventlog.recording import Recording
from scheduler.policies.registry import foresight_of
from scheduler.simulation.workload import Gate, Rows, mistaken

SHADOW = "shadow"
"""Where drafts come from, as recordings have it."""

_Taken = t.GateFired | t.Predicted | t.Foreseen | t.TokenDecoded | t.RequestClosed
_TAKEN = get_args(_Taken)


@dataclass(slots=True)
class RecordedWorkload:
    """One recorded request, of `tokens` tokens; see `Workload`.

    Passes are counted by token, though several may have been rows of one block. What the recording lacks is drawn. A
    draft that the main model never answered is right with the share of those that it did answer. The experts of a row
    after a wrong draft are those of another pass of the answer, unless such a row was recorded for its place.
    """

    number: int
    prompt_tokens: int
    experts: int
    prefill: list[list[Rows]] = field(default_factory=list)
    """By pass over the prompt, by layer."""
    passes: list[list[tuple[int, ...]]] = field(default_factory=list)
    """By token that was read, by layer: the row of the last block that read it."""
    predictions: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    replaced: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """Of the predictions, those that were others at first: what the shadow predicted ahead of an alignment."""
    drafts: dict[int, bool] = field(default_factory=dict)
    """Number of a token -> whether its draft was right, if there was one."""
    refused: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """(index, layer) -> routes of a row that read a wrong draft, or one after it."""
    strayed: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """(index, layer) -> what the shadow predicted from a token that was wrong, or after one."""
    ttft_s: float = 0.0
    """Recorded time from the start of prefill to its last answer, by the main node's clock."""
    decode_s: float = 0.0
    """Recorded time from the start of the first decode pass to the last answer of the last one."""
    recall: float | None = None
    """If given, predictions are drawn at random with this recall, in place of the recorded ones."""
    acceptance: float | None = None
    """If given, each draft is right with this probability, in place of the recorded ones."""
    likely: float | None = None
    """The probability that a draft is right that was not recorded; None: `accepted_share`."""
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
    def accepted_share(self) -> float | None:
        """Share of the recorded drafts that were right; None without any."""
        return sum(self.drafts.values()) / len(self.drafts) if self.drafts else None

    @property
    def has_scores(self) -> bool:
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
        return mistaken(self._draw(index, layer), self.passes[index][layer], self.experts, self.recall)

    def same_token(self, index: int) -> bool:
        """As recorded. Without any drafts always: then another token shows in `replaced` only."""
        share = self.acceptance
        if share is None:
            if index in self.drafts:
                return self.drafts[index]
            share = self.accepted_share if self.likely is None else self.likely
        return share is None or self._draw("token", index)() < share

    def ahead(self, index: int, layer: int, same: bool) -> tuple[int, ...] | None:
        """What was predicted first, from the same or from another token. After a late departure the first is what was
        predicted last, too."""
        if not same:
            return self._astray(index, layer)
        before = self.replaced.get((index, layer)) if self.recall is None else None
        return self.predict(index, layer) if before is None else before

    def misled_routes(self, index: int, layer: int) -> tuple[int, ...]:
        """As recorded, else what was predicted from another token, else the routes of another pass."""
        key = index, layer
        found = self.refused.get(key, self.strayed.get(key))
        return self.passes[self._other(index)][layer] if found is None else found

    def _astray(self, index: int, layer: int) -> tuple[int, ...]:
        """What is predicted in a pass that reads another token, or comes after one."""
        if self.recall is None:
            return self.strayed.get((index, layer)) or self.misled_routes(index, layer)
        return mistaken(self._draw("astray", index, layer), self.misled_routes(index, layer), self.experts, self.recall)

    def _other(self, index: int) -> int:
        """Another pass of the answer, if there is one."""
        count = len(self.passes)
        other = int(self._draw("other", index)() * (count - 1))
        return min(other + (other >= index), count - 1)

    def _draw(self, *what: object) -> Callable[[], float]:
        return Random(" ".join(map(str, (self.seed, self.number, *what)))).random


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
                readers[command.visit.request].on_resumed(command.visit, now)
        if isinstance(event, t.StepStarted):
            steps.add([readers[begun.request] for begun in event.passes if begun.request in readers])
            for begun in event.passes:
                if begun.request in readers:
                    readers[begun.request].on_pass_began(begun, now)
        if isinstance(event, _TAKEN):
            number = event.visit.request if isinstance(event, t.GateFired) else event.request
            if number in readers:
                readers[number].take(event, now)
    whole = {reader: one for reader in found if (one := reader.workload()) is not None}
    foresight = foresight_of(recording.core_config.shape, recording.core_config.system)
    for reader, one in whole.items():
        one.foresight = foresight
        one.group, one.step = steps.place(reader)
        if recording.about.get("draft_from", SHADOW) != SHADOW:  # they say nothing about a shadow's
            one.drafts.clear()
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
    """Collects one request's events. Positions are those of passes, ordinals those of MoE layers."""

    def __init__(self, shape: t.ModelShape, opened: t.RequestOpened) -> None:
        self._shape = shape
        self._opened = opened
        self._ordinal = {layer: ordinal for ordinal, layer in enumerate(shape.layers)}
        self._gates: dict[tuple[int, int], t.GateFired] = {}  # (position, ordinal) -> its gate
        self._foreseen: dict[tuple[int, int], list[t.Foreseen]] = {}  # likewise -> the scores that followed it
        self._predictions: dict[tuple[int, int], list[tuple[float, tuple[int, ...]]]] = {}  # (index, ordinal)
        self._last = (0, 0)
        self._chunks: dict[int, int] = {}  # position -> tokens of each pass over the prompt, in their order
        self._blocks: dict[int, int] = {}  # position -> rows of each pass that decodes, in their order
        self._decoded: dict[int, tuple[float, t.TokenDecoded]] = {}  # likewise -> what it gave, once told
        self._tokens = 0  # of the answer, once it was closed
        self._from: dict[bool, float] = {}  # when prefill, and the first pass of decoding, began
        self._ends: dict[int, float] = {}  # position -> time of its last answer

    def on_pass_began(self, one: t.Pass, now: float) -> None:
        self._from.setdefault(one.prefill, now)
        (self._chunks if one.prefill else self._blocks)[one.position] = one.tokens

    def take(self, event: _Taken, now: float) -> None:
        if isinstance(event, t.GateFired):
            self._last = event.visit.position, self._ordinal[event.visit.layer]
            self._gates[self._last] = event
        elif isinstance(event, t.Foreseen):
            self._foreseen.setdefault(self._last, []).append(event)
        elif isinstance(event, t.Predicted):
            key = event.position - self._opened.prompt_tokens, self._ordinal[event.layer]
            self._predictions.setdefault(key, []).append((now, event.experts))
        elif isinstance(event, t.RequestClosed):
            self._tokens = self._tokens or event.tokens
        elif self._blocks:
            self._decoded[next(reversed(self._blocks))] = now, event

    def _index(self, position: int) -> int:
        """The index of a decode pass; -1, -2, ...: of one over the prompt."""
        if position >= self._opened.prompt_tokens:
            return position - self._opened.prompt_tokens
        return -1 - list(self._chunks).index(position) if position in self._chunks else -1

    def on_resumed(self, visit: t.Visit, now: float) -> None:
        if visit.layer == self._shape.layers[-1]:
            self._ends[visit.position] = now

    def workload(self) -> RecordedWorkload | None:
        first = self._opened.prompt_tokens
        prefill = [gates for position in self._chunks if (gates := self._gates_of(position)) is not None]
        if len(prefill) < len(self._chunks) or sum(self._chunks.values()) != first or first < 1:
            return None
        one = RecordedWorkload(self._opened.request, first, self._shape.experts)
        one.prefill = [[gate.rows for gate in gates] for gates in prefill]
        one.chunks = tuple(self._chunks.values())
        told = self._read_passes(one)
        self._read_predictions(one, told)
        for (position, layer), event in self._gates.items():
            if (index := self._index(position)) < len(one.passes) and self._blocks.get(position, 1) == 1:
                seen = self._foreseen.get((position, layer), ())
                foreseen = [(self._index(e.position), self._ordinal[e.layer], e.scores) for e in seen]
                one.gates[index, layer] = Gate(event.chosen, event.scores, tuple(foreseen))
        last_chunk = self._ends[list(self._chunks)[-1]]
        one.ttft_s = last_chunk - self._from[True]
        return one

    def _gates_of(self, position: int) -> list[t.GateFired] | None:
        """The gates of every layer of a pass; None if the pass is incomplete."""
        found = [self._gates.get((position, layer)) for layer in range(len(self._shape.layers))]
        gates = [one for one in found if one is not None]
        return gates if position in self._ends and len(gates) == len(found) else None

    def _read_passes(self, one: RecordedWorkload) -> dict[int, float]:
        """Passes by token, and drafts. Returns when the main model's token was told in place of each wrong draft."""
        told: dict[int, float] = {}
        position = begun = one.prompt_tokens
        while (gates := self._gates_of(position)) is not None:
            rows = self._blocks.get(position, 1)
            gained = self._count_gained(position, len(one.passes), rows)
            chosen = _rows_of(gates, rows)
            if chosen is None or not 1 <= gained <= rows:
                break
            begun, index = position, len(one.passes)
            one.passes += chosen[:gained]
            for row in range(gained, rows):
                for layer, experts in enumerate(chosen[row]):
                    one.refused.setdefault((index + row, layer), experts)
            one.drafts |= dict.fromkeys(range(index + 1, index + gained), True)
            now, event = self._decoded.get(position, (0.0, None))
            right = False if gained < rows else event.foretold if event is not None else None
            if event is not None and right is not None:
                one.drafts[event.index] = right
                if not right:
                    told[event.index] = now
            position += gained
        if one.passes and False in self._from:
            one.decode_s = self._ends[begun] - self._from[False]
        return told

    def _count_gained(self, position: int, index: int, rows: int) -> int:
        """Tokens that a pass gave. The last one of an answer is not told: it gave as many as the answer has more."""
        if position in self._decoded:
            return self._decoded[position][1].index - index
        return min(rows, max(1, self._tokens - 1 - index)) if self._tokens else rows

    def _read_predictions(self, one: RecordedWorkload, told: dict[int, float]) -> None:
        """`told`: see `_read_passes`. What came before was predicted from the wrong draft, or after it."""
        wrong, latest = dict(told), -math.inf
        for index in range(len(one.passes)):
            latest = wrong[index] = wrong.get(index, latest)
        for (index, layer), came in self._predictions.items():
            if not 0 <= index < len(one.passes):
                continue
            key = index, layer
            right = [experts for now, experts in came if now >= wrong[index]]
            if len(right) < len(came):
                one.strayed[key] = next(experts for now, experts in came if now < wrong[index])
            if right:
                one.predictions[key] = right[-1]
            if len(right) > 1:
                one.replaced[key] = right[0]


def _rows_of(gates: list[t.GateFired], rows: int) -> list[list[tuple[int, ...]]] | None:
    """The experts of each row, by layer. None: the gates are not those of so many rows."""
    if rows == 1:
        return [[tuple([expert for expert, _ in gate.rows]) for gate in gates]]
    if any(len(gate.chosen) != rows for gate in gates):
        return None
    return [[gate.chosen[row] for gate in gates] for row in range(rows)]

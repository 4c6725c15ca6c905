"""Requests on a virtual clock: when they arrive, which of them are open, and the passes that they have in a step."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.simulation.drafts import RequestDrafts
from scheduler.simulation.scenario import Scenario
from scheduler.simulation.workload import SAME_TOKEN, Rows, Workload, random_workload
from scheduler.types import Pass

_ONE_EACH = itertools.repeat(1)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to simulate."""

    workload: Workload
    prompt_tokens: int
    tokens: int
    """Of the answer, including the first one, which prefill gives."""
    at: float = 0.0
    """Seconds after the simulation's start."""
    step: int = 0
    """The step that it joins at the earliest, counted from 0: that of a recorded run."""


def random_arrivals(
    scenario: Scenario, recall: float | None = None, seed: int = 0, same_token: float = SAME_TOKEN
) -> list[Arrival]:
    """The scenario's requests, each with random routes of its own; those of the first are `random_workload`'s."""
    seeds: list[int | str] = [seed, *(f"{seed}/{number}" for number in range(2, scenario.requests + 1))]
    times = scenario.arrivals or (0.0,) * scenario.requests
    return [
        Arrival(random_workload(scenario, recall, own, same_token, seed), scenario.prompt_tokens, scenario.tokens, at)
        for own, at in zip(seeds, times, strict=True)
    ]


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request and how far its answer is."""

    number: int
    arrival: Arrival
    arrived: float
    """Seconds. One that joins a step of a recorded run arrives with it."""
    read: int = 0
    """Tokens of the prompt that have been read."""
    chunks: int = 0
    """Passes over the prompt so far."""
    done: list[float] = field(default_factory=list)
    """The time of each token of the answer, beginning with the one that prefill gives."""
    drafts: RequestDrafts | None = None
    """None: the shadow drafts nothing."""
    block: tuple[int, int] = (1, 0)
    """Where it drafts: rows of the next pass, and how many of the drafts in it are right."""

    def choose_block(self) -> None:
        """A pass has ended, and the next one takes the drafts that have come until now, as in the engine: others of its
        step may end later."""
        if self.drafts is not None:
            self.block = self.drafts.block(self.arrival.tokens - len(self.done))

    @property
    def complete(self) -> bool:
        return len(self.done) >= self.arrival.tokens


@dataclass(slots=True, eq=False)
class StepPass:
    """A request's pass in a step."""

    request: SimulatedRequest
    position: int
    tokens: int
    prefill: bool
    order: int
    """Its place in the step."""
    right: int = 0
    """Right drafts among its rows."""
    main_s: float = 0.0
    """Seconds of one of its layers on the main node."""

    @property
    def as_pass(self) -> Pass:
        return Pass(self.request.number, self.position, self.tokens, self.prefill)

    @property
    def index(self) -> int:
        """As workloads count: that of the decode pass of its first row; -1, -2, ...: a pass over the prompt."""
        if self.prefill:
            return -1 - self.request.chunks
        return self.position - self.request.arrival.prompt_tokens

    def rows(self, layer: int) -> tuple[Rows, tuple[tuple[int, ...], ...]]:
        """Of its gate of a layer: (expert, rows), and the experts of each row if it is a block."""
        workload = self.request.arrival.workload
        if self.prefill:
            return workload.prompt(layer, self.position, self.position + self.tokens), ()
        if self.tokens == 1:
            return tuple(zip(sorted(workload.routes(self.index, layer)), _ONE_EACH, strict=False)), ()
        first, right = self.index, self.tokens if self.request.drafts is None else 1 + self.right
        chosen = tuple(
            [
                workload.routes(first + row, layer) if row < right else workload.misled_routes(first + row, layer)
                for row in range(self.tokens)
            ]
        )
        counts: dict[int, int] = {}
        for experts in chosen:
            for expert in experts:
                counts[expert] = counts.get(expert, 0) + 1
        return tuple(sorted(counts.items())), chosen

    def advance(self, now: float) -> int:
        """The pass is over. Returns how many tokens the answer has gained: none after a chunk that is not the last,
        several after a block whose drafts are right."""
        request, arrival = self.request, self.request.arrival
        gained = 1
        if self.prefill:
            request.read += self.tokens
            request.chunks += 1
            gained = int(request.read >= arrival.prompt_tokens)
            if gained and request.drafts is not None:
                request.drafts.on_prefilled()
        else:
            gained += self.right
            if request.drafts is not None:
                request.drafts.read(self.tokens, gained)
        request.done += [now] * gained
        return gained


class RequestQueue:
    """Requests that wait, and those that are open. `parallel`: most that are open at once, None: no limit. `chunk`:
    most tokens of prompts in a step while several requests are open, 0: no limit. `block`: rows of a decode pass."""

    def __init__(self, arrivals: Sequence[Arrival], parallel: int | None, chunk: int, block: int = 1) -> None:
        self.requests = [SimulatedRequest(number, arrival, arrival.at) for number, arrival in enumerate(arrivals, 1)]
        """All, numbered from 1."""
        self._waiting = deque(self.requests)
        self._open: list[SimulatedRequest] = []
        self._parallel = parallel or len(self.requests)
        self._chunk = chunk
        self._block = block

    @property
    def has_unfinished(self) -> bool:
        """Some request has not got its last token."""
        return bool(self._waiting) or any(not request.complete for request in self._open)

    def admit(self, now: float, step: int) -> list[SimulatedRequest]:
        """Open what has arrived, first come first served."""
        admitted: list[SimulatedRequest] = []
        while self._waiting and len(self._open) < self._parallel:
            arrival = self._waiting[0].arrival
            if arrival.at > now or (arrival.step > step and any(not one.complete for one in self._open)):
                break
            request = self._waiting.popleft()
            if arrival.step:
                request.arrived = now
            admitted.append(request)
            self._open.append(request)
        return admitted

    def close(self, request: SimulatedRequest) -> bool:
        """Whether it was open."""
        if request not in self._open:
            return False
        self._open.remove(request)
        return True

    def passes(self) -> list[StepPass]:
        """The passes of the next step, in the order in which the requests were opened: of each one that decodes, and
        of prompts no more than a chunk. The first prompt is read in chunks if it must; while others decode, another one
        joins only as a whole."""
        bound = self._chunk if self._chunk and len(self._open) > 1 else 0
        ready = [request for request in self._open if not request.complete]
        decoding = any(request.done for request in ready)
        found: list[StepPass] = []
        room = bound
        for request in ready:
            if request.done:
                found.append(self._decode(request, len(found)))
                continue
            tokens = self._unread(request)
            if bound and not request.arrival.workload.chunks:
                if room < bound and decoding and tokens > room:
                    continue
                tokens = min(tokens, bound)
                room -= tokens
            found.append(StepPass(request, request.read, tokens, True, len(found)))
        return found

    def _decode(self, request: SimulatedRequest, order: int) -> StepPass:
        arrival, count = request.arrival, len(request.done)
        rows, right, most = 1, 0, arrival.tokens - count
        if request.drafts is not None:
            rows, right = request.block
        elif self._block > 1:
            rows = min(self._block, most)
            while right < rows - 1 and arrival.workload.same_token(count + right):
                right += 1
        return StepPass(request, arrival.prompt_tokens + count - 1, rows, False, order, right)

    def _unread(self, request: SimulatedRequest) -> int:
        """Tokens of its prompt that its next pass may read."""
        chunks = request.arrival.workload.chunks
        return chunks[request.chunks] if chunks else request.arrival.prompt_tokens - request.read

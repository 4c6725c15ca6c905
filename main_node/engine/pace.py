"""The main node's clock: real, or emulated by a profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from scheduler import types as t
from scheduler.emulation.clock import CREDIT_S, Emulation
from wire import runtime

T = TypeVar("T")


class Pace(Protocol):
    """See `MainPace`, which keeps a profile's times."""

    @property
    def profile_name(self) -> str | None:
        """The profile's name."""

    @property
    def lost_s(self) -> float:
        """See `Emulation.lost_s`. 0 in real time."""

    def now(self) -> float: ...

    def begin_step(self, passes: tuple[t.Pass, ...], batched: bool) -> None: ...

    def begin_layer(self, requests: Iterable[int]) -> None: ...

    def on_paused(self, request: int, seconds: float) -> None: ...

    def on_decoded(self, request: int) -> None: ...

    def next_pass(self, request: int, take: Callable[[], T]) -> T: ...

    def gate(self, request: int, fired: Callable[[], T]) -> T: ...

    def on_foreseen(self, request: int, tell: Callable[[], object], attended: bool) -> None: ...

    def on_answered(self, request: int) -> None: ...

    def on_resumed(self, request: int) -> None: ...

    def on_handled(self, event: t.Event, now: float, commands: list[t.Command]) -> None: ...


class RealPace:
    """Real time."""

    profile_name = None
    lost_s = 0.0

    def now(self) -> float:
        return runtime.monotonic()

    def begin_step(self, passes: tuple[t.Pass, ...], batched: bool) -> None:
        pass

    def begin_layer(self, requests: Iterable[int]) -> None:
        pass

    def on_paused(self, request: int, seconds: float) -> None:
        pass

    def on_decoded(self, request: int) -> None:
        pass

    def next_pass(self, request: int, take: Callable[[], T]) -> T:
        return take()

    def gate(self, request: int, fired: Callable[[], T]) -> T:
        return fired()

    def on_foreseen(self, request: int, tell: Callable[[], object], attended: bool) -> None:
        tell()

    def on_answered(self, request: int) -> None:
        pass

    def on_resumed(self, request: int) -> None:
        pass

    def on_handled(self, event: t.Event, now: float, commands: list[t.Command]) -> None:
        pass


@dataclass(slots=True)
class _Times:
    """One request's."""

    ready: float
    """Its last answer; at first, when it came."""
    tokens: int = 1
    """Of its pass."""
    layer_s: float = 0.0
    gate: float = -math.inf
    paused_s: float = 0.0
    """Since its last pass: the time for which nothing was asked of this machine."""


class MainPace:
    """Emulated time. The main node computes one layer of one pass at a time: it takes `main_s`, from the last answer of
    the pass's layer before it, or from the start of its step, and once the main node is free, to its gate.

    In a `batched` step a layer of all passes is computed at once, when all of them have their last answers.

    Work for a predictor between a gate and the last answer costs nothing: the main node would only wait. `on_answered`
    is called on the thread that brings an answer, `on_decoded` on the request's, everything else on the thread that
    runs the model; one step at a time.
    """

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._requests: dict[int, _Times] = {}
        self._free = self._ended = -math.inf
        self._together: float | None = None
        """When the gates of the layer under way fire, in a batched step."""

    @property
    def profile_name(self) -> str | None:
        """The profile's name."""
        return self._emulation.profile.name

    @property
    def lost_s(self) -> float:
        return self._emulation.lost_s

    def now(self) -> float:
        """The calling thread's time."""
        return self._emulation.now()

    def begin_step(self, passes: tuple[t.Pass, ...], batched: bool) -> None:
        """A step starts at the last answer of the one before it, or as soon as a request is there. A request's first
        pass is there now."""
        times = [self._requests.setdefault(one.request, self._of(one.request)) for one in passes]
        begin = max(self._ended, min(one.ready for one in times))
        for one, mine in zip(passes, times, strict=True):
            mine.ready, mine.tokens = begin, one.tokens
            mine.layer_s = self._emulation.profile.main_s(one.tokens)
        self._free = begin
        self._together = None
        if batched:
            self.begin_layer(one.request for one in passes)
        self._emulation.adopt(begin)

    def begin_layer(self, requests: Iterable[int]) -> None:
        """In a batched step: these passes, which all have their last answers, go on with the next layer together. One
        whose request was closed meanwhile keeps nobody waiting."""
        times = [self._requests[request] for request in requests if request in self._requests]
        if not times:
            return
        layer_s = self._emulation.profile.main_s(sum(one.tokens for one in times))
        self._together = max(one.ready for one in times) + layer_s

    def on_paused(self, request: int, seconds: float) -> None:
        """Between two passes the client took so long, or the shadow's start: that is no lateness of the machine."""
        self._of(request).paused_s += seconds

    def on_decoded(self, request: int) -> None:
        """A token exists, and the next pass is about to be announced. It starts at the last answer, or now where the
        caller has let time pass in between."""
        times = self._of(request)
        clock = self._emulation.clock()
        if clock - times.ready > CREDIT_S:
            self._emulation.stood_still(times.ready + times.paused_s, clock)
            times.ready = clock
        times.paused_s = 0.0
        self._emulation.adopt(times.ready)

    def next_pass(self, request: int, take: Callable[[], T]) -> T:
        """The next pass is about to begin. `take` looks at what has come for it until then."""
        return self._emulation.agenda.wait(self._of(request).ready, take)

    def gate(self, request: int, fired: Callable[[], T]) -> T:
        """The gate has fired. `fired` announces it when it is due, in order with everything else that is due; then this
        thread's time is the gate's."""
        times = self._of(request)
        due = max(times.ready, self._free) + times.layer_s if self._together is None else self._together
        times.gate = self._free = due
        result = self._emulation.agenda.wait(due, fired)
        self._emulation.go_on(due)
        return result

    def on_foreseen(self, request: int, tell: Callable[[], object], attended: bool) -> None:
        """The main model has computed scores for a predictor. `tell` announces them when they are due: with the gate;
        or, where they come from the next layer's attention (`attended`), a layer's time after the last answer so far.
        """
        times = self._of(request)
        known = max(times.gate, times.ready) + times.layer_s if attended else times.gate
        self._emulation.agenda.at(known, tell)

    def on_answered(self, request: int) -> None:
        """A computation has been answered."""
        times = self._requests.get(request)
        if times is not None:
            times.ready = max(times.ready, self._emulation.go_on())

    def on_resumed(self, request: int) -> None:
        """The layer has all its answers."""
        times = self._of(request)
        self._ended = max(self._ended, times.ready)
        self._emulation.adopt(times.ready)

    def on_handled(self, event: t.Event, now: float, commands: list[t.Command]) -> None:
        """See `main_node.engine.engine.Observer`: nothing more comes of a request that was closed."""
        if isinstance(event, t.RequestClosed):
            self._requests.pop(event.request, None)

    def _of(self, request: int) -> _Times:
        """From now on for a request that is new, or was closed in the middle of its pass."""
        return self._requests.get(request) or _Times(self._emulation.clock())

"""Where the time of a step that decodes goes. Every moment of it belongs to exactly one cause.

The main node computes a layer, until its gate: `main`. Else it waits for an answer with which it can go on: a lone
request's layer is complete then, and of several requests one's. It waits for a chain of events, which is followed
backwards from that answer, as far back as the wait goes:

network   the answer's way back and the rows' way to the worker, with queues for the shared link
compute   the expert's computation, and those of other experts that the worker had to finish before it
load      the rows' wait for their load, as far as an earlier prediction would not have shortened it: until one load
          time after the last computed expert left the slot (and the worker's link was free)
shadow    the rest of that wait: the load began late because the prediction was late, wrong, or had filled the slot
          with an expert that was not needed. Without predictions there is no such part, and all of it is `load`.

If an expert's rows were sent only after another expert had left the slot, they waited for that expert's chain, which is
then followed in turn. So these four add up to the wait, and with `main` to the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.types import Compute, Load

CAUSES = ("main", "network", "compute", "load", "shadow")
BOUNDS = {"compute": ("main", "compute"), "network": ("network",), "load": ("load",), "shadow": ("shadow",)}
"""Each possible bottleneck, and the causes that count towards it."""


@dataclass(slots=True, eq=False)
class LoadTimes:
    """One load, in seconds. All experts of a host place share one that ended before the simulation began."""

    command: Load
    received: float
    """When the worker got the command."""
    freed: float
    """When the last computed expert had left the slot."""
    waiting: list[CallTimes]
    """Computations that wait for this load."""
    full_s: float
    """What a load in the full form takes on its worker."""
    share: float = 1.0
    """Its time divided by that of a load in the full form."""
    begun: float = -1.0
    """When it began to use the link; -1: not yet. Likewise `ended`."""
    ended: float = -1.0
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class CallTimes:
    """One computation, in seconds."""

    command: Compute
    load: LoadTimes
    rows: int
    sent: float
    arrives: float
    after: CallTimes | None
    """The computation after whose answer this one could be sent. None: it was sent at the gate."""
    start: float = 0.0
    end: float = 0.0


class TimeBreakdown:
    """Adds up the main node's seconds by cause. `predicted`: whether the system has a predictor."""

    def __init__(self, predicted: bool) -> None:
        self.steps = 0
        """Steps that decode."""
        self._main = self._network = self._compute = self._load = self._shadow = 0.0
        self._predicted = predicted

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by cause."""
        added = self._main, self._network, self._compute, self._load, self._shadow
        return dict(zip(CAUSES, added, strict=True))

    def add_compute(self, seconds: float) -> None:
        """The main node computed."""
        self._main += seconds

    def add_wait(self, since: float, last: CallTimes | None, now: float) -> None:
        """The main node waited from `since` until the answer of `last` arrived, `now`."""
        network = compute = load = shadow = 0.0
        call, until = last, now
        while call is not None and call.sent >= since:
            ready = max(call.arrives, call.load.ended)
            network += until - call.end + call.arrives - call.sent
            compute += call.end - ready
            early = self._early(call, ready)
            load += early - call.arrives
            shadow += ready - early
            until, call = call.sent, call.after
        if call is not None:  # it began while the main node computed for another request
            ready = max(call.arrives, call.load.ended)
            early, end = self._early(call, ready), max(call.end, since)
            network += until - end + max(0.0, call.arrives - since)
            compute += end - max(ready, since)
            load += max(early, since) - max(call.arrives, since)
            shadow += max(ready, since) - max(early, since)
            until = since
        self._network += network
        self._compute += compute
        self._load += load + until - since  # before the first rows were sent, because no slot was free
        self._shadow += shadow

    def _early(self, call: CallTimes, ready: float) -> float:
        """When its load would have ended at the earliest had it been predicted early: from `call.arrives` to `ready`.
        Without predictions that is when it did."""
        times = call.load
        if not self._predicted or ready == call.arrives:
            return ready
        early = times.freed + times.begun - times.received + times.full_s * times.share
        return min(max(early, call.arrives), ready)


def bound_by(where: dict[str, float]) -> str:
    """The bottleneck: compute (main node and experts together), network, load or shadow."""
    return max(BOUNDS, key=lambda bound: sum(where[cause] for cause in BOUNDS[bound]))

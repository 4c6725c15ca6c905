"""What the referee of the random worlds writes down: one load, one gate, one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler import types as t
from scheduler.policies.routers import Chosen

Expert = tuple[int, int]
"""(layer, number), equal to the `ExpertId` of the same two."""


NOBODY = t.Visit(0, 0, 0)
"""In place of a visit that a load was begun for, and that does not expect it any more."""


@dataclass(slots=True, eq=False)
class Use:
    """What was sent to be computed for one visit, and not answered."""

    sent: int = 0
    owed: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Attempt:
    """One load and what is computed in its slot, for whom; or what a host place computes. `keeps`: the policy let it
    stay. `used`: something was sent for it; `done`: and answered. `owners`: the visits that its load may have been
    begun for; `served`: those of them that it was computed for. `last_call`: after which the worker evicts it;
    `leaving`: and its answer is awaited."""

    load: t.Load
    keeps: bool = False
    loaded: bool = False
    failed: bool = False
    at: int = 0
    used: bool = False
    done: bool = False
    owners: frozenset[t.Visit] = frozenset()
    served: set[t.Visit] = field(default_factory=set)
    uses: dict[t.Visit, Use] = field(default_factory=dict)
    last_call: int = 0
    leaving: bool = False

    def disown(self, visit: t.Visit, another: bool) -> None:
        """If its load was begun for that visit, it is nobody's now; unless `another` row of the request expects it."""
        if visit in self.owners:
            self.owners = (self.owners if another else self.owners - {visit}) | {NOBODY}

    @property
    def warms_up(self) -> bool:
        """It may have been begun for a warm-up."""
        return any(visit.layer < 0 for visit in self.owners) and not self.uses


@dataclass(slots=True, eq=False)
class Gate:
    """A gate that has fired, until its layer is resumed. `rows`: by expert, after the router. `chosen`: the gate's own
    choice, for each row. `positions`: of the rows. `predicted`: by the last predictions of its rows before it fired.

    It is united, `at` that time, when the gates of all passes in the step have fired. `present`: experts of its layer
    that were in slots then, in a form that serves. `best`: of each row. `hinted`: those that were predicted for any of
    its passes."""

    rows: dict[int, int]
    chosen: Chosen
    positions: range
    prefill: bool
    predicted: frozenset[int]
    united: bool = False
    at: int = 0
    deadline: int = 0
    present: frozenset[int] = frozenset()
    best: frozenset[int] = frozenset()
    hinted: frozenset[int] = frozenset()
    routed: Chosen | None = None
    hosted: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    last_load: int = 0

    def covers(self, visit: t.Visit, row: t.Visit) -> bool:
        """Whether that row is one of its visit's."""
        return visit[::2] == row[::2] and row.position in self.positions


@dataclass(slots=True)
class Range:
    """A figure that the books cannot tell exactly."""

    least: int = 0
    most: int = 0

    def add(self, sure: bool, possible: bool = True) -> None:
        self.least += sure
        self.most += sure or possible

    @property
    def exact(self) -> bool:
        return self.least == self.most

    def __contains__(self, figure: int) -> bool:
        return self.least <= figure <= self.most


@dataclass(slots=True)
class Reading:
    """What the gate named for one row in decoding, and what the prediction that belongs to it did. `wrong`: the row was
    not right, and is read again."""

    named: frozenset[int]
    predicted: frozenset[int] | None = None
    wrong: bool = False


@dataclass(slots=True, eq=False)
class RequestBooks:
    """The referee's own figures of one request, named as those of `RequestStats`. `broken`: it ended in a layer.
    `first`, `stop`: the rows of its last pass; `fired`, `united`: the last layer of it whose gate has. `expected`: by
    row and layer, the last prediction that came before the gate."""

    prompt: int
    open: bool = True
    broken: bool = False
    prefilling: bool = True
    first: int = 0
    stop: int = 0
    fired: int = -1
    united: int = -1
    late: int = 0
    in_time: int = 0
    named: int = 0
    present: int = 0
    hosted: int = 0
    decode_hosted: int = 0
    stall: int = 0
    prefill_stall: int = 0
    loads: Range = field(default_factory=Range)
    reloads: Range = field(default_factory=Range)
    hits: Range = field(default_factory=Range)
    unused: Range = field(default_factory=Range)
    expected: dict[t.Visit, frozenset[int]] = field(default_factory=dict)
    readings: dict[t.Visit, list[Reading]] = field(default_factory=dict)

    def decoded(self, index: int) -> None:
        """Token `index` exists: the next pass begins with it."""
        self.prefilling, self.first, self.stop = False, self.prompt + index, self.prompt + index
        for row, readings in self.readings.items():
            for each in readings if row.position >= self.first else ():
                each.wrong = True

    def passed(self, row: t.Visit) -> bool:
        """The gate of that row's layer has fired, or the row needs no gate any more."""
        return row.position < self.first or (row.position < self.stop and row.layer <= self.fired)

    def ahead(self, position: int) -> int:
        """In how many steps from now that row is read, if blocks have one row."""
        return 0 if self.first <= position < self.stop else 1 + position - self.stop

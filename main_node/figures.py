"""What a running cluster counts, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from main_node.totals import Totals


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """One node. Its counters begin with the main node, and go on when the node is lost and comes back."""

    role: Literal["main", "worker", "shadow"]
    number: int
    """Of a worker; 0 of the others."""
    up: bool
    """Whether it is connected."""
    host: str
    device: str
    """As torch names it, and its model."""
    loader: str = ""
    """Of a worker."""
    slots: int = 0
    """Of a worker; a host place has none."""
    memory_bytes: int | None = None
    """Most bytes of weights, slots and caches. A worker's or shadow's is what it said last; None: it has not said so
    yet, or is not connected."""
    measured_load_bytes_per_s: float | None = None
    """Of a worker's loader, measured when it started."""
    round_trip_s: float | None = None
    """Of a small message, measured when the node joined."""
    loads: int = 0
    """Loads of a worker that have ended, those of audits and those whose request was given up meanwhile too."""
    bytes_loaded: int = 0
    """In these loads."""
    load_s: float = 0.0
    """Seconds that these loads took."""
    stream_bytes: tuple[tuple[str, int], ...] = ()
    """By stream, as in `Report.wire_bytes_per_token`: encoded bytes of the messages that tokens cost. Empty in one
    process, where nothing is encoded."""
    sent_bytes: int | None = None
    """Of all messages to the node; None in one process."""
    received_bytes: int | None = None
    """Of all messages from it."""
    lost: int = 0
    """How often it was lost."""
    rejoined: int = 0
    """How often it came back."""
    suspect: bool = False
    """A worker of which a wrong output is known."""

    @property
    def name(self) -> str:
        """`main`, `worker 0`, `shadow`."""
        return f"worker {self.number}" if self.role == "worker" else self.role


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """What a cluster has done since its main node started, whichever request it was for.

    `odmoe generate --json` prints the fields by these names.
    """

    lost: list[str]
    """Nodes that were lost, in order."""
    rejoined: list[str]
    """Nodes that came back, in order."""
    suspects: list[str]
    """`worker N: what was wrong with its outputs`."""
    computations: int
    """Of all workers, without those of audits."""
    audits: int
    """Computations that were done twice and compared."""
    audit_share: float
    """The share of `computations` that `--audit` asks for; 0 for none. What was done is `audits / computations`."""
    audits_missed: dict[str, int]
    """Attempts at an audit that came to nothing, by their reason: `busy` (no worker was idle and, with a share that was
    set, the main node was not either), `large` (more rows than are kept for it), `smaller form` (of the expert).
    Another computation of the same worker was tried then."""
    loads_checked: float | None
    """Of all loads of the workers since they started, the share that was compared with the store's checksums. None
    before the first load."""
    forms: list[str]
    """The forms in which experts were loaded, the largest first; the full one is empty."""
    smaller_forms: list[str]
    """Those that the precision may choose, the largest first. Empty for full precision, and for any other where all
    experts fit in full."""
    form_costs: dict[str, tuple[float, float]]
    """By form: seconds to load an expert, and to restore it for a computation, measured when the workers started (the
    median worker). Empty where forms are not chosen by their costs."""
    prediction_step_s: tuple[float, float] | None
    """Median seconds of a decode step with the main model's predictions and without them, of the last trial. If they
    clearly cost more than they save, none are made until the next one. None where no trial has ended
    (`--predictions`)."""


@dataclass(frozen=True, slots=True)
class Figures:
    """A cluster at one moment. Its counters begin with the main node's process."""

    answered: int
    """Requests that are answered now."""
    waiting: int
    """Requests that wait for one of these to end."""
    totals: Totals
    """Of all requests, those under way included."""
    cluster: ClusterFigures
    nodes: tuple[NodeFigures, ...]
    """The main node, the workers by number, the shadow: each that has ever joined."""

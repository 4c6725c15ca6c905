"""A request's figures: loads, hits, stalls, and recall (equations (2) and (3) of OD-MoE)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from scheduler.types import Visit


@dataclass(slots=True)
class RecallCounts:
    """Sums of correctly predicted and of activated experts."""

    correct: int = 0
    activated: int = 0

    @property
    def recall(self) -> float | None:
        """None while nothing was activated."""
        return self.correct / self.activated if self.activated else None


@dataclass(slots=True)
class RequestStats:
    """One request's figures."""

    prompt_tokens: int
    loads: int = 0
    decode_loads: int = 0
    """Of the loads, those begun in decoding."""
    bytes_loaded: int = 0
    loads_from_memory: int = 0
    """Loads of experts that were in host memory, a tier above the disk."""
    reloads: int = 0
    """Loads begun after the gate because no prediction had named the expert."""
    preempted: int = 0
    """Prefetches given up for a demand load."""
    unused: int = 0
    """Experts prefetched, or on their way, that the gate did not choose."""
    reused: int = 0
    """Experts computed without a load begun for them: another demand's load had brought them."""
    decode_reused: int = 0
    named: int = 0
    """Experts that decoding's gates chose for each row, after the router."""
    present: int = 0
    """Of `named`, those whose bytes were in a slot when the gate fired, in a form that serves: the papers' hits."""
    missed: int = 0
    """Different experts that decoding's gates chose and that were not present. What several requests of a step choose
    counts once, with the first of them."""
    host_calls: int = 0
    """Experts computed at a host place."""
    decode_host_calls: int = 0
    late: int = 0
    """Predictions that came after their gate."""
    in_time: int = 0
    """Activated experts that a prediction had named before the gate fired."""
    unpredicted: int = 0
    """Activated experts of layers whose prediction had not come when the figures were closed; not in `by_index`."""
    stall_s: float = 0.0
    """From each gate until the last load that it needed had ended, in decoding."""
    prefill_stall_s: float = 0.0
    by_index: list[RecallCounts] = field(default_factory=list)
    """By decode pass."""
    overall: RecallCounts = field(default_factory=RecallCounts)
    """Equation (3): over all decode passes and layers that were predicted."""
    _predicted: dict[Visit, tuple[int, ...]] = field(default_factory=dict)
    _activated: dict[Visit, Collection[int]] = field(default_factory=dict)
    _orphans: dict[Visit, Collection[int]] = field(default_factory=dict)

    def add_load(self, prefilling: bool, reload: bool, in_memory: bool = False) -> None:
        self.loads += 1
        self.loads_from_memory += in_memory
        self.decode_loads += not prefilling
        self.reloads += reload

    def reuse(self, prefilling: bool) -> None:
        """An expert that the gate chose was computed without a load begun for it."""
        self.reused += 1
        self.decode_reused += not prefilling

    def gate(self, named: int, present: int, missed: int, prefilling: bool) -> None:
        """`named`: the sum over all rows of the experts that compute a row; `present` of them were in slots. `missed`:
        different experts that were not, less those that an earlier request of the step counts."""
        if not prefilling:
            self.named += named
            self.present += present
            self.missed += missed

    def add_hosted(self, prefilling: bool) -> None:
        """An expert that the gate chose was computed at a host place."""
        self.host_calls += 1
        self.decode_host_calls += not prefilling

    def add_stall(self, seconds: float, prefilling: bool) -> None:
        if prefilling:
            self.prefill_stall_s += seconds
        else:
            self.stall_s += seconds

    def add_prediction(self, visit: Visit, experts: tuple[int, ...], late: bool = False) -> None:
        """A prediction came for a row; `late`: after its gate. Of several the last before the gate counts, or else the
        first after it."""
        activated = self._activated.pop(visit, None) if self._activated else None
        if activated is None and self._orphans:
            activated = self._orphans.pop(visit, None)
        if activated is not None:
            self._add(visit, activated, experts)
        elif not late:
            self._predicted[visit] = experts

    def add_activation(self, visit: Visit, experts: Collection[int]) -> None:
        """A decode pass's gate fired. `experts`: all different."""
        predicted = self._predicted.pop(visit, None)
        if predicted is None:
            self._activated[visit] = experts
        else:
            self._add(visit, experts, predicted)

    def read_again(self, start: int, stop: int) -> None:
        """The rows of a block at positions [start, stop) were wrong. Predictions of what they were count no more."""
        for waiting in (self._activated, self._orphans):
            for visit in [one for one in waiting if start <= one.position < stop]:
                self._close_row(visit, waiting.pop(visit))
        for visit in [one for one in self._predicted if start <= one.position < stop]:
            del self._predicted[visit]

    def _add(self, visit: Visit, activated: Collection[int], predicted: tuple[int, ...]) -> None:
        counts, overall, correct = self._counts_of(visit), self.overall, 0
        for expert in activated:
            if expert in predicted:
                correct += 1
        counts.activated += len(activated)
        counts.correct += correct
        overall.activated += len(activated)
        overall.correct += correct

    def _counts_of(self, visit: Visit) -> RecallCounts:
        index = visit.position - self.prompt_tokens
        while len(self.by_index) <= index:
            self.by_index.append(RecallCounts())
        return self.by_index[index]

    @property
    def unmatched_count(self) -> int:
        """Layers whose gate has fired and whose prediction has not come yet."""
        return len(self._activated)

    @property
    def orphans(self) -> int:
        """Layers whose prediction the shadow owed when it was lost, and has not sent since."""
        return len(self._orphans)

    def orphan(self) -> None:
        """The shadow is gone: do not wait for the predictions that are still missing."""
        self._orphans |= self._activated
        self._activated.clear()

    def close(self) -> None:
        """Predictions that are still missing were neither right nor wrong: `unpredicted` counts them."""
        self.orphan()
        for visit, experts in self._orphans.items():
            self._close_row(visit, experts)
        self._orphans.clear()
        self._predicted.clear()

    def _close_row(self, visit: Visit, experts: Collection[int]) -> None:
        self._counts_of(visit)  # its token is there, if without a recall
        self.unpredicted += len(experts)

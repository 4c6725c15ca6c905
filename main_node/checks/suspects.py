"""Where outputs come from: the workers' processes, their faults, and which of them are not trusted any more."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from scheduler.errors import WrongOutputError
from wire.messages import WorkerReady

MOST_MARKS = 3
"""Outputs that were not finite or were damaged, until a worker is dropped. One may be a bit that flipped."""

Arithmetic = tuple[str, str]
"""What computes: the kind of device and its name. Equal ones are expected to compute the same bits."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Source:
    """One process of a worker."""

    number: int
    host: str
    pid: int
    arithmetic: Arithmetic
    marks: Counter[str] = field(default_factory=Counter)
    """Faults that may be accidents."""
    proof: str = ""
    """Why it is not trusted any more."""

    @property
    def name(self) -> str:
        return f"worker {self.number} (process {self.pid} on {self.host})"

    @property
    def faults(self) -> str:
        """Empty where it has none."""
        marks = self.marks.items()
        return self.proof or ", ".join(f"{n} outputs {fault}" if n > 1 else f"an output {fault}" for fault, n in marks)

    @property
    def error(self) -> WrongOutputError:
        """With which it is dropped."""
        return WrongOutputError(f"{self.name} gives wrong outputs: {self.faults}")


class Suspects:
    """The workers' processes, by worker number. One that is not trusted is not taken back; another one in its place is.

    Not thread-safe: the engine holds its lock.
    """

    def __init__(self) -> None:
        self._sources: dict[int, Source] = {}
        self._before: dict[int, str] = {}
        """Worker -> what an earlier process of it has done."""

    def check(self, number: int, ready: WorkerReady) -> None:
        """A worker wants to join. Raises WrongOutputError for a process that was dropped for its outputs."""
        known = self._sources.get(number)
        if known is not None and known.proof and (known.host, known.pid) == (ready.host, ready.pid):
            raise WrongOutputError(
                f"{known.name} is not taken back: it gave wrong outputs ({known.proof}); check that machine's memory, "
                "then restart the worker"
            )

    def on_joined(self, number: int, ready: WorkerReady) -> None:
        """Marks belong to a process: another one starts with none."""
        known = self._sources.get(number)
        if known is None or (known.host, known.pid) != (ready.host, ready.pid):
            self._before.update(self.facts())
            arithmetic = ready.device.partition(":")[0], ready.device_name
            self._sources[number] = Source(number, ready.host, ready.pid, arithmetic)

    def source(self, number: int) -> Source:
        """The worker's process. It must have joined."""
        return self._sources[number]

    def mark(self, source: Source, fault: str) -> bool:
        """An output was wrong, perhaps by accident. True when that was once too often: the worker must be dropped."""
        source.marks[fault] += 1
        _log.warning("%s is suspect: it gave an output %s", source.name, fault)
        if source.marks.total() >= MOST_MARKS:
            source.proof = source.faults
        return bool(source.proof)

    def banned_workers(self) -> set[int]:
        """Workers whose latest processes are not taken back."""
        return {number for number, source in self._sources.items() if source.proof}

    def facts(self) -> dict[int, str]:
        """Worker -> its faults since the cluster started, ascending. Without those that have none."""
        found = {number: source.faults for number, source in self._sources.items() if source.faults}
        return dict(sorted((self._before | found).items()))

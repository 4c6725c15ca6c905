"""Workers that have given wrong outputs: how often, and which of them are not trusted any more."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from scheduler.errors import WrongOutputError
from wire.messages import WorkerReady

MOST_MARKS = 3
"""Outputs that were not finite or were damaged, until a worker is dropped. One may be a bit that flipped."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Suspect:
    """One worker's process."""

    process: tuple[str, int]
    """Its host and process id."""
    marks: Counter[str] = field(default_factory=Counter)
    """Faults that may be accidents."""
    proof: str = ""
    """Why it is not trusted any more."""


class Suspects:
    """By worker number. A process that is not trusted is not taken back; another process in its place is.

    Not thread-safe: the engine holds its lock.
    """

    def __init__(self) -> None:
        self._workers: dict[int, _Suspect] = {}
        self._before: dict[int, str] = {}
        """Worker -> what an earlier process of it has done."""

    def check(self, number: int, ready: WorkerReady) -> None:
        """A worker wants to join. Raises WrongOutputError for a process that was dropped for its outputs."""
        known = self._workers.get(number)
        if known is not None and known.proof and known.process == (ready.host, ready.pid):
            raise WrongOutputError(
                f"worker {number} (process {ready.pid} on {ready.host}) is not taken back: {known.proof}; check that "
                "machine's memory, then restart the worker"
            )

    def joined(self, number: int, ready: WorkerReady) -> None:
        """Marks belong to a process: another one starts with none."""
        process = (ready.host, ready.pid)
        known = self._workers.get(number)
        if known is None or known.process != process:
            self._before.update(self.facts())
            self._workers[number] = _Suspect(process)

    def mark(self, number: int, fault: str) -> WrongOutputError | None:
        """A worker's output was wrong, perhaps by accident. Returns an error, with which it must be dropped, when that
        was once too often."""
        suspect = self._workers[number]
        suspect.marks[fault] += 1
        _log.warning("worker %d is suspect: it gave an output %s", number, fault)
        return self.convict(number, _faults(suspect.marks)) if suspect.marks.total() >= MOST_MARKS else None

    def convict(self, number: int, proof: str) -> WrongOutputError:
        """The worker is not trusted any more. Returns the error with which it must be dropped."""
        suspect = self._workers[number]
        suspect.proof = suspect.proof or proof
        host, pid = suspect.process
        return WrongOutputError(f"worker {number} (process {pid} on {host}) gives wrong outputs: {suspect.proof}")

    def trusts(self, number: int) -> bool:
        return number in self._workers and not self._workers[number].proof

    def facts(self) -> dict[int, str]:
        """Worker -> what it has done since the cluster started, ascending. Without those that have no mark."""
        found = {number: suspect.proof or _faults(suspect.marks) for number, suspect in self._workers.items()}
        return dict(sorted((self._before | {number: fault for number, fault in found.items() if fault}).items()))


def _faults(marks: Counter[str]) -> str:
    each = (f"{count} outputs {fault}" if count > 1 else f"an output {fault}" for fault, count in marks.items())
    return ", ".join(each)

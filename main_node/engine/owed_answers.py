"""Loads and computations that workers have not answered yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from scheduler import types as t
from scheduler.errors import ProtocolError
from wire import runtime

Question = t.Load | t.Compute
A = TypeVar("A", t.Load, t.Compute)


@dataclass(slots=True)
class _Account:
    """One worker's."""

    owed: dict[int, tuple[Question, float]] = field(default_factory=dict)
    """Number -> command and when it was sent, oldest first."""
    answered: float = 0.0
    """When it last answered."""


class OwedAnswers:
    """A worker is silent when it owes answers and has given none for `answer_s` seconds."""

    def __init__(self, answer_s: float) -> None:
        self.answer_s = answer_s
        self._accounts: dict[int, _Account] = {}

    def __len__(self) -> int:
        return sum(len(account.owed) for account in self._accounts.values())

    def ask(self, number: int, command: Question) -> None:
        """`number`: the load's or the call's."""
        account = self._accounts.setdefault(command.worker, _Account())
        account.owed[number] = (command, runtime.monotonic())

    def settle(self, worker: int, number: int, kind: type[A]) -> A | None:
        """A worker answers a load or call. None: the answer is not needed any more. Raises ProtocolError."""
        account = self._accounts.get(worker)
        mine = account.owed.get(number) if account is not None else None
        if account is None or mine is None:
            self._check_not_owed(worker, number)
            return None
        command = mine[0]
        if not isinstance(command, kind):
            raise ProtocolError(f"worker {worker} answered number {number}, which is {command}")
        del account.owed[number]
        account.answered = runtime.monotonic()
        return command

    def _check_not_owed(self, worker: int, number: int) -> None:
        for account in self._accounts.values():
            if number in account.owed:
                raise ProtocolError(f"worker {worker} answered number {number}, which is {account.owed[number][0]}")

    def forgive_slot(self, worker: int, slot: int) -> None:
        """The worker will not answer for what was in the slot."""
        account = self._accounts.get(worker)
        if account is not None:
            account.owed = {n: owed for n, owed in account.owed.items() if owed[0].slot != slot}

    def forgive(self, worker: int) -> None:
        """The worker is lost."""
        self._accounts.pop(worker, None)

    def clear(self) -> None:
        self._accounts.clear()

    def silent(self) -> list[int]:
        return [worker for worker, account in self._accounts.items() if account.owed and self._left_s(account) <= 0]

    @property
    def left_s(self) -> float:
        """Seconds until the next worker might count as silent."""
        return min((self._left_s(a) for a in self._accounts.values() if a.owed), default=self.answer_s)

    def _left_s(self, account: _Account) -> float:
        _, oldest = next(iter(account.owed.values()))
        return max(oldest, account.answered) + self.answer_s - runtime.monotonic()

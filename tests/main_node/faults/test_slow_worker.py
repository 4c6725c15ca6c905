"""A main node that is faster than its workers does not drown them: rows wait where they are made."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import worker_node.session
from checkpoint.expert import ExpertArithmetic
from wire.credit import RowBudget, message_bytes
from wire.messages import Compute

pytestmark = pytest.mark.timeout(180)
MOST = 6000
"""Room for a few computations of a prompt."""
TOKENS = 4


@pytest.fixture
def budgets(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    class Noted(RowBudget):
        def __init__(self) -> None:
            super().__init__(MOST)
            self.peak = self.largest = 0
            made.append(self)

        def add(self, message: Compute) -> bool:
            added = super().add(message)
            self.largest = max(self.largest, message_bytes(message))
            self.peak = max(self.peak, self.nbytes)
            return added

    monkeypatch.setattr(worker_node.session, "RowBudget", Noted)
    return made


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = ExpertArithmetic.bind

    def bound(self: Any, *args: Any) -> Any:
        compute = bind(self, *args)

        def slowly(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            time.sleep(0.003)
            return compute(hidden, weights)

        return slowly

    monkeypatch.setattr(ExpertArithmetic, "bind", bound)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("slots", [4, 8])
def test_rows_wait_at_the_main_node(slots: int, budgets: list[Any], cluster_of: Any, reference: Any) -> None:
    cluster = cluster_of(slots=slots, remote=True)
    expected = reference("float32", 3, TOKENS)
    held: list[int] = []
    for tap in cluster.taps:
        admit = tap._handler.credit.admit

        def noted(messages: Any, admit: Any = admit) -> Any:
            messages = list(messages)
            free = admit(messages)
            held.append(len(messages) - len(free))
            return free

        tap._handler.credit.admit = noted
    tokens, _ = cluster.answer(list(expected.prompt), TOKENS)
    assert tokens == list(expected.tokens)
    assert all(budget.peak <= max(MOST, budget.largest) for budget in budgets)
    assert all(budget.nbytes == 0 for budget in budgets)
    assert max(held) > 0, "nothing had to wait: the test shows nothing"
    assert not any(tap._handler.credit.holds for tap in cluster.taps)
    cluster.nothing_left()

"""The main node keeps to its credit: no worker has more rows waiting than it said, and none is forgotten."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.credit import MESSAGE_BYTES, QUEUE_BYTES, RowBudget, RowCredit, message_bytes
from wire.messages import MAX_MESSAGE_BYTES, Align, Compute, Evict, Load, Tensor

MOST = 21_000


def compute(call: int, slot: int, rows: int) -> Compute:
    hidden, weights = Tensor("uint8", (rows,), bytes(rows)), Tensor("uint8", (0,), b"")
    return Compute(call, slot, 0, 0, hidden, weights, False)


def test_what_a_message_takes():
    assert message_bytes(compute(1, 0, 500)) == 500 + MESSAGE_BYTES
    parts = (Tensor("float32", (5,), bytes(20)), Tensor("float32", (0,), b""))
    assert message_bytes(Align(1, 0, 5, 0, parts)) == 20 + MESSAGE_BYTES


def test_a_worker_that_states_nothing_has_room_for_a_message():
    assert QUEUE_BYTES == MAX_MESSAGE_BYTES
    credit = RowCredit(0)
    large = [compute(call, 0, 40 << 20) for call in (1, 2)]
    assert credit.admit(large) == large[:1]


def test_messages_keep_their_order():
    """What follows a computation that waits, waits too, a load or an eviction as well."""
    credit = RowCredit(MOST)
    first, second, third = compute(1, 0, 15_000), compute(2, 1, 15_000), compute(3, 2, 10)
    behind = [second, Load(9, 3, 0, 0), third]
    assert credit.admit([Load(8, 0, 0, 0), first, *behind]) == [Load(8, 0, 0, 0), first]
    assert credit.holds
    assert credit.admit([Evict(3)]) == []
    credit.settle(1)
    assert credit.admit([]) == [*behind, Evict(3)]
    assert not credit.holds


def test_one_may_always_go():
    credit = RowCredit(MOST)
    large = compute(1, 0, 10 * MOST)
    assert credit.admit([large, compute(2, 0, 1)]) == [large]
    budget = RowBudget(MOST)
    assert budget.add(large)
    assert not budget.add(compute(2, 0, 1))


def test_an_eviction_gives_back_what_waits_for_its_slot():
    credit = RowCredit(MOST)
    credit.admit([compute(1, 0, 9000), compute(2, 1, 9000)])
    assert credit.admit([Evict(0), compute(3, 2, 9000)]) == [Evict(0), compute(3, 2, 9000)]
    credit.settle(1)  # answered all the same, and counted once
    assert credit.nbytes == 2 * (9000 + MESSAGE_BYTES)


def test_a_number_used_twice_is_counted_twice():
    budget = RowBudget(MOST)
    same = [compute(1, 0, 9000) for _ in range(2)]
    assert [budget.add(message) for message in [*same, compute(1, 0, 9000)]] == [True, True, False]
    budget.drop(same[0])
    assert budget.nbytes == 9000 + MESSAGE_BYTES
    budget.drop_slot(0)
    budget.drop(same[1])
    assert budget.nbytes == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_worker_never_holds_more_than_it_said(data: st.DataObject):
    """Whatever is told, in whatever order the worker answers, and however long a message is on its way."""
    credit, budget = RowCredit(MOST), RowBudget(MOST)
    there: deque[object] = deque()
    back: deque[Compute] = deque()
    held: list[Compute] = []
    told = arrived = call = 0
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["compute", "compute", "evict", "arrive", "answer", "settle"]))
        if action in ("compute", "evict"):
            call += 1
            slot, rows = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 25_000))
            there += credit.admit([compute(call, slot, rows) if action == "compute" else Evict(slot)])
            told += 1
        elif action == "arrive" and there:
            message = there.popleft()
            arrived += 1
            if isinstance(message, Compute):
                assert budget.add(message), "the main node has exceeded its credit"
                held.append(message)
            else:
                budget.drop_slot(message.slot)
                held = [one for one in held if one.slot != message.slot]
        elif action == "answer" and held:
            answered = held.pop(data.draw(st.integers(0, len(held) - 1)))
            budget.drop(answered)
            back.append(answered)
        elif action == "settle" and back:
            credit.settle(back.popleft().call_id)
            there += credit.admit([])
        assert budget.nbytes <= max(MOST, *(message_bytes(one) for one in held), 0)
    for _ in range(3 * told):  # everything arrives in the end
        while there:
            message = there.popleft()
            arrived += 1
            if isinstance(message, Compute):
                assert budget.add(message)
                held.append(message)
            else:
                budget.drop_slot(message.slot)
                held = [one for one in held if one.slot != message.slot]
        for one in [*back, *held]:
            budget.drop(one)
            credit.settle(one.call_id)
        back.clear()
        held.clear()
        there += credit.admit([])
    assert arrived == told
    assert credit.nbytes == budget.nbytes == 0


@pytest.mark.parametrize("slot", [0, 1])
def test_of_other_slots_nothing_is_given_back(slot: int):
    budget = RowBudget(MOST)
    budget.add(compute(1, slot, 100))
    budget.drop_slot(1 - slot)
    assert budget.nbytes == 100 + MESSAGE_BYTES

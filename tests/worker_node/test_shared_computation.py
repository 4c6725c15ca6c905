"""Computations of several requests with one expert, made as one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from checkpoint.expert import ExpertArithmetic
from checkpoint.kernels import SHARED_ROWS
from checkpoint.tensors import tensor_from_bytes
from support.nodes.held import HeldArithmetic, HeldLoader
from support.nodes.worker_desk import NO_THREAD_FAILS, WRONG_ROWS, Expected, MainEnd, WorkerDesk
from wire.messages import Compute, Computed, Evict, Failed, Load, Loaded
from worker_node.node import Worker

pytestmark = NO_THREAD_FAILS
CALLS = range(10, 15)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each computation. Every expert counts as one whose rows can be computed together."""
    counted: list[int] = []
    run = Worker.run

    def watched(self: Worker, slot: int, layer: int, form: str, hidden: torch.Tensor, weights: torch.Tensor) -> Any:
        counted.append(len(hidden))
        return run(self, slot, layer, form, hidden, weights)

    monkeypatch.setattr(Worker, "run", watched)
    monkeypatch.setattr(ExpertArithmetic, "is_rowwise", lambda *_: True)
    return counted


def loading(desk: WorkerDesk, loader: HeldLoader, slots: int) -> MainEnd:
    """A main node whose load of expert 0 is under way, in slot 0."""
    gate = loader.hold(0, 0)
    main = desk.welcome(desk.worker(slots=slots, loader=loader))
    main.send(Load(1, 0, 0, 0))
    gate.wait_for_arrival()
    return main


def close(answer: Any, asked: Compute, expected: Expected) -> bool:
    assert isinstance(answer, Computed), answer
    found = tensor_from_bytes(answer.output.dtype, answer.output.shape, answer.output.data)
    torch.testing.assert_close(found, expected(asked), rtol=2**-6, atol=2**-6)
    return answer.call_id == asked.call_id


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("rows", [1, 3])
def test_what_waits_for_a_load_is_computed_at_once(
    desk: WorkerDesk, held_loader: HeldLoader, expected: Expected, made: list[int], slots: int, rows: int
) -> None:
    main = loading(desk, held_loader, slots)
    asked = [desk.compute(call, 0, 0, 0, rows=rows, evict=call == CALLS[-1]) for call in CALLS]
    made.clear()  # less what a worker measures at its start
    for one in asked:
        main.send(one)
    held_loader.gates[0, 0].open()
    assert isinstance(main.next(), Loaded)
    assert all(close(main.next(), one, expected) for one in asked)
    assert made == [len(CALLS) * rows]
    main.loads_and_computes(2, desk.compute(20, 0, 0, 1), expected)  # the last one has freed the slot


def test_no_more_rows_than_keep_their_bits(
    desk: WorkerDesk, held_loader: HeldLoader, expected: Expected, made: list[int]
) -> None:
    main = loading(desk, held_loader, 1)
    asked = [desk.compute(call, 0, 0, 0, rows=rows, evict=False) for call, rows in enumerate((20, 12, 1, 40, 3, 2), 10)]
    made.clear()
    for one in asked:
        main.send(one)
    held_loader.gates[0, 0].open()
    assert isinstance(main.next(), Loaded)
    assert all(close(main.next(), one, expected) for one in asked)
    assert made == [SHARED_ROWS, 1, 40, 5]


def test_each_alone_where_rows_could_change_bits(
    desk: WorkerDesk,
    held_loader: HeldLoader,
    expected: Expected,
    made: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ExpertArithmetic, "is_rowwise", lambda *_: False)
    main = loading(desk, held_loader, 1)
    made.clear()
    asked = [desk.compute(call, 0, 0, 0, evict=False) for call in CALLS]
    for one in asked:
        main.send(one)
    held_loader.gates[0, 0].open()
    assert isinstance(main.next(), Loaded)
    assert all(expected.fits(main.next(), one) for one in asked)
    assert made == [3] * len(CALLS)


@pytest.mark.parametrize("wrong", WRONG_ROWS)
def test_a_wrong_one_fails_alone(
    desk: WorkerDesk, held_loader: HeldLoader, expected: Expected, made: list[int], wrong: str
) -> None:
    main = loading(desk, held_loader, 1)
    asked = [desk.compute(call, 0, 0, 0, evict=call == CALLS[-1]) for call in CALLS]
    asked[2] = replace(asked[2], hidden=WRONG_ROWS[wrong])
    for one in asked:
        main.send(one)
    held_loader.gates[0, 0].open()
    answers = main.hear(1 + len(asked))  # what cannot be a row is refused before the load has ended
    assert ("Loaded", 1) in answers
    for one in asked:
        if one is asked[2]:
            assert isinstance(answers["Failed", one.call_id], Failed)
        else:
            assert expected.fits(answers["Computed", one.call_id], one)
    main.loads_and_computes(2, desk.compute(20, 0, 0, 1), expected)


def test_an_eviction_in_between_drops_the_rest(
    desk: WorkerDesk, held_arithmetic: HeldArithmetic, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeldArithmetic, "is_rowwise", lambda *_: True)
    gate = held_arithmetic.hold(0)
    main = desk.welcome(desk.worker(slots=1, arithmetic=held_arithmetic))
    main.send(Load(1, 0, 0, 0))
    assert isinstance(main.next(), Loaded)
    asked = [desk.compute(call, 0, 0, 0, evict=False) for call in CALLS]
    main.send(asked[0])
    gate.wait_for_arrival()
    for one in asked[1:]:
        main.send(one)
    main.send(Evict(0))
    gate.open()
    assert expected.fits(main.next(), asked[0])
    main.loads_and_computes(2, desk.compute(20, 0, 0, 1), expected)


def test_an_eviction_before_a_shared_computation_fails_frees_the_slot(
    desk: WorkerDesk, held_loader: HeldLoader, expected: Expected, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_node.node.SLOT_DEADLINE_S", 1.0)
    main = loading(desk, held_loader, 1)

    def failing(*_: Any) -> Any:
        main.send(Evict(0), Load(2, 0, 0, 1))
        raise RuntimeError("no memory for all of them")

    monkeypatch.setattr(Worker, "compute_together", failing)
    for call in CALLS:
        main.send(desk.compute(call, 0, 0, 0, evict=False))
    held_loader.gates[0, 0].open()
    assert set(main.hear(2)) == {("Loaded", 1), ("Loaded", 2)}


@pytest.mark.parametrize(("is_elementwise", "computations"), [(True, [6]), (False, [4, 2])])
def test_passes_share_nothing_if_a_value_s_bits_depend_on_its_place(
    desk: WorkerDesk,
    expected: Expected,
    made: list[int],
    monkeypatch: pytest.MonkeyPatch,
    is_elementwise: bool,
    computations: list[int],
) -> None:
    monkeypatch.setattr(ExpertArithmetic, "is_elementwise", lambda *_: is_elementwise)
    main = desk.welcome(desk.worker())
    made.clear()
    main.loads_and_computes(1, replace(desk.compute(20, 0, 0, 1, rows=6), passes=(0, 0, 1, 1, 0, 0)), expected)
    assert made == computations

"""The engine with workers whose outputs are well-formed and wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from checkpoint.tensors import received_tensor, tensor_bytes
from scheduler.errors import RequestFailedError, WrongOutputError
from support.nodes.engine_world import (
    HIDDEN,
    LAYERS,
    Desk,
    Fake,
    Later,
    Rows,
    Say,
    computed,
    good,
    once,
    rows_of,
    worker_ready,
)
from wire import messages as w
from wire.checksums import tensor_checksum

pytestmark = pytest.mark.timeout(120)

Damage = Callable[[w.Computed, random.Random], w.Computed]
NAN, INF = float("nan"), float("inf")


def element(value: float) -> Damage:
    def damage(answer: w.Computed, rng: random.Random) -> w.Computed:
        output = received_tensor(answer.output).clone()
        output[0, rng.randrange(HIDDEN)] = value
        changed = w.Tensor(*tensor_bytes(output))
        return replace(answer, output=changed, checksum=tensor_checksum(changed))

    return damage


def flip(answer: w.Computed, rng: random.Random) -> w.Computed:
    """A bit, after the worker has made its checksum."""
    data = bytearray(answer.output.data)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    assert isinstance(answer.output, w.Tensor)
    return replace(answer, output=replace(answer.output, data=bytes(data)), checksum=tensor_checksum(answer.output))


def wrong(damage: Damage, always: bool = True, seed: int = 0) -> Callable[[Fake, w.Message], Say]:
    rng = random.Random(seed)
    return once(w.Compute, lambda fake, message: damage(computed(message), rng), always)


@pytest.mark.parametrize(
    "damage", [element(NAN), element(INF), element(-INF), flip], ids=["nan", "inf", "-inf", "flip"]
)
def test_a_fault_at_any_point_changes_no_answer(damage: Damage, desk_of: Any) -> None:
    """One output of an answer is damaged: each of them in turn."""
    for point in range(2 * len(LAYERS)):
        rng, answered = random.Random(point), 0

        def script(fake: Fake, message: w.Message, rng: random.Random = rng, point: int = point) -> Say:
            nonlocal answered
            answer = good(fake, message)
            if isinstance(answer, w.Computed):
                answered += 1
                if answered - 1 == point:
                    return damage(answer, rng)
            return answer

        desk = desk_of()
        desk.workers(script, script, script)
        desk.open()
        for layer in LAYERS:
            desk.check(rows_of(point + layer), layer)
        assert len(desk.engine.peers.suspects.facts()) == 1
        assert len(desk.engine.peers.workers) == 3
        desk.close()


@pytest.mark.parametrize(("damage", "fault"), [(element(NAN), "not finite"), (flip, "with a wrong checksum")])
def test_a_worker_with_three_faults_is_dropped_and_named(damage: Damage, fault: str, desk: Desk, caplog: Any) -> None:
    fakes = desk.workers(wrong(damage), good, good)
    desk.open()
    for turn in range(4):
        for layer in LAYERS:
            desk.check(rows_of(layer, experts=(0, 1)), layer, position=5 + turn)
    assert len(fakes[0].of(w.Compute)) == 3
    assert sorted(desk.engine.peers.workers) == [1, 2]
    assert desk.engine.peers.suspects.facts() == {0: f"3 outputs {fault}"}
    assert f"worker 0 is lost: worker 0 (process 42 on box) gives wrong outputs: 3 outputs {fault}" in caplog.text


def test_a_dropped_process_is_not_taken_back_and_another_one_is(desk: Desk) -> None:
    desk.workers(wrong(element(NAN)), good)
    desk.open()
    for turn in range(3):
        for layer in LAYERS:
            desk.check(rows_of(layer, experts=(0, 1)), layer, position=5 + turn)
    assert sorted(desk.engine.peers.workers) == [1]
    with pytest.raises(
        WrongOutputError, match=r"worker 0 \(process 42 on box\) is not taken back: .*3 outputs not finite"
    ):
        desk.join(0, desk.fake(good))
    other = once(w.Hello, lambda fake, m: replace(worker_ready(1), pid=43))
    desk.join(0, desk.fake(other))
    desk.check(rows_of(9, experts=(0, 1)), position=9)
    assert sorted(desk.engine.peers.workers) == [0, 1]
    assert desk.engine.peers.suspects.facts() == {0: "3 outputs not finite"}  # it is history


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_expert_that_computes_infinity_is_believed_and_nobody_is_blamed(workers: int, desk: Desk) -> None:
    """Every worker has the same infinite weight in one expert."""

    def act(fake: Fake, message: w.Compute) -> Say:
        answer = computed(message)
        return element(INF)(answer, random.Random(0)) if message.expert == 1 else answer

    desk.workers(*[once(w.Compute, act, always=True)] * workers)
    desk.open()
    for layer in LAYERS:
        got = Later(lambda layer=layer: desk.layer(rows_of(1, experts=(0, 1)), layer)).result()
        assert torch.isinf(got).sum() == 1
    assert len(desk.engine.peers.workers) == workers
    assert desk.engine.peers.suspects.facts() == {}


@pytest.mark.parametrize("place", ["hidden", "weights"])
def test_rows_that_were_not_finite_are_not_the_workers_fault(place: str, desk: Desk) -> None:
    fakes = desk.workers(good, good)
    desk.open()
    rows = rows_of(1, experts=(0, 1))
    getattr(rows, place)[0, 0] = NAN
    got = Later(lambda: desk.layer(rows)).result()
    assert not got.isfinite().all()
    assert desk.engine.peers.suspects.facts() == {}
    assert sum(len(fake.of(w.Compute)) for fake in fakes) == 2


@pytest.mark.parametrize(("value", "faults"), [(3e38, {0: "an output not finite"}), (1e18, {})])
def test_an_output_is_as_finite_as_its_norm(value: float, faults: dict[int, str], desk: Desk) -> None:
    """Each element of it is finite; a norm that overflows in float32 cannot be divided by."""

    def act(fake: Fake, message: w.Compute) -> Say:
        return replace(computed(message), output=w.Tensor(*tensor_bytes(torch.full((1, HIDDEN), value))))

    desk.workers(once(w.Compute, act, always=True), good)
    desk.open()
    rows = Rows(torch.zeros(1, HIDDEN), torch.tensor([[0, 1]]), torch.zeros(1, 2))
    Later(lambda: desk.layer(rows)).result()
    assert desk.engine.peers.suspects.facts() == faults


def test_a_malformed_output_is_named(desk: Desk) -> None:
    narrow = w.Tensor("float32", (1, 1), bytes(4))
    desk.workers(once(w.Compute, lambda fake, m: w.Computed(m.call_id, narrow, 0.0)), good)
    desk.open()
    desk.check(rows_of(1, experts=(0, 1)))
    assert sorted(desk.engine.peers.workers) == [1]
    assert "shape (1, 1)" in desk.engine.peers.suspects.facts()[0]


def test_the_last_worker_that_lies_is_named_in_the_error(desk: Desk) -> None:
    desk.workers(wrong(flip))
    desk.open()
    with pytest.raises(RequestFailedError, match=r"worker 0 .*gives wrong outputs: 3 outputs with a wrong checksum"):
        Later(lambda: desk.layer(rows_of(1))).result()

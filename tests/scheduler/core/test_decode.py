"""Decoding, exact decisions: the paper's pipeline, without a shadow, with any number of workers and requests."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from scheduler import types as t
from scheduler.errors import ConfigError
from scheduler.policies.residency.base import Everything
from support.scheduling.core_driver import Driver, P, compute, in_place


def test_commands_carry_the_ids_that_their_facts_come_back_with() -> None:
    d = Driver(workers=2, layers=1)
    d.open()
    d.predict(0, 3, 5)
    first, second = d.raw
    assert isinstance(first, t.Load)
    assert isinstance(second, t.Load)
    assert first == t.Load(0, 0, t.ExpertId(0, 3), first.load_id)
    assert second == t.Load(1, 0, t.ExpertId(0, 5), second.load_id)
    assert first.load_id != second.load_id
    visit = t.Visit(1, P, 0)
    d.gate(0, 3, 5)
    one, two = d.raw
    assert isinstance(one, t.Compute)
    assert isinstance(two, t.Compute)
    assert one == t.Compute(0, 0, t.ExpertId(0, 3), one.call_id, visit, 0, 1, True)
    assert two == t.Compute(1, 0, t.ExpertId(0, 5), two.call_id, visit, 0, 1, True)
    assert len({first.load_id, second.load_id, one.call_id, two.call_id}) == 4
    d.computed(0)
    d.computed(1)
    assert d.raw == [t.Resume(visit)]


@pytest.mark.parametrize(
    ("bad", "allowed"),
    [
        (lambda: Driver(mini_batch=0), "allowed: 1, 2"),
        (lambda: Driver(slots=-1), r"-1 slots; allowed: 0 \(a host place\), 1"),
        (lambda: Driver(group=0), "allowed: 1, 2"),
    ],
)
def test_settings_that_cannot_be_are_refused(bad: Any, allowed: str) -> None:
    with pytest.raises(ConfigError, match=allowed):
        bad()


# --- the paper's pipeline ---------------------------------------------------------------------------------------------


def test_the_papers_pipeline_of_eight_workers_in_four_groups() -> None:
    """Figure 2: while group 1 computes layer l, groups 2 to 4 load for l+1 to l+3; then group 1 loads for l+4."""
    d = Driver(workers=8, group=2, layers=6)
    assert d.open() == ["follow 1 from 0", f"align 1 step 0 token kv 0:{P}"]
    assert d.predict(0, 3, 5) == ["load 0.0 0/3", "load 1.0 0/5"]
    assert d.predict(1, 1, 2) == ["load 2.0 1/1", "load 3.0 1/2"]
    assert d.predict(2, 7, 0) == ["load 4.0 2/7", "load 5.0 2/0"]
    assert d.predict(3, 4, 6) == ["load 6.0 3/4", "load 7.0 3/6"]
    assert d.predict(4, 5, 2) == []  # every slot is taken: waits for group 1
    assert d.predict(5, 3, 1) == []
    assert d.loaded(*range(8)) == []

    assert d.gate(0, 3, 5) == compute("0.0 0/3", "1.0 0/5")
    assert d.computed(0) == ["load 0.0 4/5"]
    assert d.computed(1) == [f"resume 1@{P} layer 0", "load 1.0 4/2"]
    assert d.gate(1, 1, 2) == compute("2.0 1/1", "3.0 1/2")
    assert d.computed(3) == ["load 3.0 5/1"]
    assert d.computed(2) == [f"resume 1@{P} layer 1", "load 2.0 5/3"]
    assert d.gate(2, 0, 7) == compute("5.0 2/0", "4.0 2/7")  # as the gate names them: ascending
    assert d.computed(4, 5) == [f"resume 1@{P} layer 2"]
    # The next token's first layers go on with groups 3 and 4: the turn does not start anew with a token.
    assert d.predict(0, 6, 7, at=P + 1) == ["load 4.0 0/6", "load 5.0 0/7"]
    assert d.predict(1, 0, 1, at=P + 1) == []
    assert d.gate(3, 4, 6) == compute("6.0 3/4", "7.0 3/6")
    assert d.computed(6) == ["load 6.0 1/0"]
    assert d.computed(7) == [f"resume 1@{P} layer 3", "load 7.0 1/1"]
    assert d.loaded(0, 1, 2, 3, 4, 5) == []
    assert d.gate(4, 2, 5) == compute("1.0 4/2", "0.0 4/5")
    assert d.computed(0, 1) == [f"resume 1@{P} layer 4"]
    assert d.gate(5, 1, 3) == compute("3.0 5/1", "2.0 5/3")
    assert d.computed(2, 3) == [f"resume 1@{P} layer 5"]
    assert d.token(1) == [f"align 1 step 1 token kv {P}:{P + 1}"]
    assert d.predict(2, 2, 3, at=P + 1) == ["load 0.0 2/2", "load 1.0 2/3"]
    assert d.gate(0, 6, 7, at=P + 1) == compute("4.0 0/6", "5.0 0/7", at=f"1@{P + 1}")

    stats = d.stats()
    assert (stats.loads, stats.decode_loads, stats.reloads, stats.unused, stats.preempted) == (18, 18, 0, 0, 0)
    assert stats.stall_s == 0.0
    assert [counts.recall for counts in stats.by_index] == [1.0, 1.0]


def test_a_correct_prediction_needs_no_load_after_the_gate_even_while_it_loads() -> None:
    d = Driver()
    d.open()
    d.predict(0, 3, 5)
    d.now = 10.0
    assert d.gate(0, 3, 5) == compute("0.0 0/3", "1.0 0/5")  # the worker holds the rows until its load has ended
    d.now = 12.0
    assert d.loaded(0) == []
    d.now = 15.0
    assert d.loaded(1) == []
    assert d.stats().stall_s == 5.0
    assert d.computed(0, 1) == [f"resume 1@{P} layer 0"]
    assert (d.stats().loads, d.stats().reloads) == (2, 0)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ((3, 4), ["evict 1.0 0/5", *compute("0.0 0/3"), "load 1.0 0/4", *compute("1.0 0/4")]),
        ((0, 5), ["evict 0.0 0/3", *compute("1.0 0/5"), "load 0.0 0/0", *compute("0.0 0/0")]),
        ((1, 3), ["evict 1.0 0/5", *compute("0.0 0/3"), "load 1.0 0/1", *compute("1.0 0/1")]),
        (
            (1, 2),
            [
                "evict 0.0 0/3",
                "evict 1.0 0/5",
                "load 0.0 0/1",
                *compute("0.0 0/1"),
                "load 1.0 0/2",
                *compute("1.0 0/2"),
            ],
        ),
        ((5,), ["evict 0.0 0/3", *compute("1.0 0/5")]),
        ((), ["evict 0.0 0/3", "evict 1.0 0/5", f"resume 1@{P} layer 0"]),
    ],
)
@pytest.mark.parametrize("loaded", [False, True], ids=["loading", "resident"])
def test_a_misprediction_is_evicted_and_reloaded_in_its_place(
    named: tuple[int, ...], expected: list[str], loaded: bool
) -> None:
    d = Driver()
    d.open()
    for layer in range(4):
        d.predict(layer, 3, 5)  # every worker is busy, so the wrong one's slot is the one to use
    if loaded:
        d.loaded(*range(8))
    assert d.gate(0, *named) == expected
    missed = len(set(named) - {3, 5})
    assert (d.stats().reloads, d.stats().unused) == (missed, 2 - len({3, 5} & set(named)))
    assert d.stats().overall.correct == len({3, 5} & set(named))


def test_without_a_shadow_everything_is_reloaded_group_after_group() -> None:
    d = Driver(workers=8, group=2, layers=6, shadow=False)
    assert d.open() == []
    at = f"1@{P}"
    for layer, (a, b) in enumerate([(0, 1), (2, 3), (4, 5), (6, 7), (0, 1), (2, 3)]):
        assert d.gate(layer, 2, 6) == [
            f"load {a}.0 {layer}/2",
            f"compute {a}.0 {layer}/2 {at} 0:1 last",
            f"load {b}.0 {layer}/6",
            f"compute {b}.0 {layer}/6 {at} 0:1 last",
        ]
        d.now += 3
        d.loaded(a, b)
        assert d.computed(a, b) == [f"resume {at} layer {layer}"]
    assert (d.stats().loads, d.stats().reloads, d.stats().stall_s) == (12, 12, 18.0)
    assert d.stats().overall.recall is None  # nothing was predicted, so there is no recall to speak of


def test_more_experts_than_workers_in_a_group_take_turns_in_its_slots() -> None:
    d = Driver(workers=4, group=2, layers=2)
    d.open()
    assert d.predict(0, 0, 1, 2, 3, 4) == ["load 0.0 0/0", "load 1.0 0/1"]  # 0, 2, 4 on worker 0; 1, 3 on worker 1
    assert d.predict(1, 5, 6, 7) == ["load 2.0 1/5", "load 3.0 1/6"]
    d.loaded(0, 1)
    assert d.gate(0, 0, 1, 2, 3, 4) == compute("0.0 0/0", "1.0 0/1")
    assert d.computed(0) == ["load 0.0 0/2", *compute("0.0 0/2")]
    assert d.loaded(0) == []
    assert d.computed(0) == ["load 0.0 0/4", *compute("0.0 0/4")]
    assert d.computed(1) == ["load 1.0 0/3", *compute("1.0 0/3")]
    assert d.computed(1) == []
    assert d.loaded(0) == []
    assert d.computed(0) == [f"resume 1@{P} layer 0"]
    assert d.gate(1, 5, 6, 7) == compute("2.0 1/5", "3.0 1/6")
    assert d.computed(2) == ["load 2.0 1/7", *compute("2.0 1/7")]
    assert d.computed(3, 2) == [f"resume 1@{P} layer 1"]
    assert (d.stats().loads, d.stats().reloads, d.in_slots) == (8, 0, {})


@pytest.mark.parametrize(
    ("workers", "groups"),
    [
        (1, [(0, 0), (0, 0), (0, 0)]),
        (3, [(0, 1), (2, 0), (1, 2), (0, 1), (2, 0), (1, 2)]),
        (5, [(0, 1), (2, 3), (4, 0), (1, 2), (3, 4), (0, 1)]),
        (12, [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (0, 1)]),
    ],
)
def test_any_number_of_workers(workers: int, groups: list[tuple[int, int]]) -> None:
    """Groups of two: with one worker both experts go through its one slot, with an odd number groups wrap around."""
    d = Driver(workers=workers, group=2, layers=len(groups))
    d.open()
    for layer, (a, b) in enumerate(groups):
        one, two = f"{a}.0 {layer}/6", f"{b}.0 {layer}/1"
        if a != b:
            assert sorted(d.predict(layer, 6, 1)) == sorted([f"load {one}", f"load {two}"])
            d.loaded(a, b)
            assert d.gate(layer, 1, 6) == compute(two, one)
        else:
            assert d.predict(layer, 6, 1) == [f"load {one}"]
            d.loaded(a)
            assert d.gate(layer, 1, 6) == compute(one)
            assert d.computed(a) == [f"load {two}", *compute(two)]
        assert (d.computed(a, b) if a != b else d.computed(b)) == [f"resume 1@{P} layer {layer}"]
    assert d.in_slots == {}


def test_two_slots_let_a_worker_load_ahead() -> None:
    d = Driver(workers=2, slots=2, group=2, layers=3)
    d.open()
    assert d.predict(0, 3, 5) == ["load 0.0 0/3", "load 1.0 0/5"]
    assert d.predict(1, 1, 2) == ["load 0.1 1/1", "load 1.1 1/2"]
    assert d.predict(2, 6, 7) == []
    assert d.gate(0, 3, 5) == compute("0.0 0/3", "1.0 0/5")
    assert d.computed(0) == ["load 0.0 2/6"]
    assert d.computed(1) == [f"resume 1@{P} layer 0", "load 1.0 2/7"]
    assert d.gate(1, 1, 2) == compute("0.1 1/1", "1.1 1/2")


# --- several requests -------------------------------------------------------------------------------------------------


def test_a_request_closed_in_the_middle_of_a_layer_takes_only_its_own_along() -> None:
    d = Driver(workers=4, group=1, layers=2)
    d.open(1)
    d.open(2)
    d.step(1, 2)
    assert d.predict(0, 3, request=1) + d.predict(1, 4, request=1) == ["load 0.0 0/3", "load 1.0 1/4"]
    assert d.predict(0, 5, request=2) == ["load 2.0 0/5"]
    assert d.gate(0, 3, 6, request=1) == []  # the other gate has not fired
    assert d.do(t.RequestClosed(1)) == ["evict 0.0 0/3", "evict 1.0 1/4", "unfollow 1"]
    assert d.do(t.RequestClosed(1)) == []
    assert d.gate(0, 5, request=2) == compute("2.0 0/5", at=f"2@{P}")
    assert d.computed(2) == [f"resume 2@{P} layer 0"]
    assert d.in_slots == {}


def test_two_requests_of_a_step_share_a_load_and_the_last_of_them_evicts() -> None:
    d = Driver(workers=2, group=2, layers=2)
    d.open(1)
    d.open(2)
    d.step(1, 2)
    assert d.predict(0, 1, 2, request=1) == ["load 0.0 0/1", "load 1.0 0/2"]
    assert d.predict(0, 1, 3, request=2) == []  # expert 1 is on its way
    assert d.predict(1, 6, 7, request=1) == []
    assert d.gate(0, 1, 3, request=2) == []
    assert d.gate(0, 1, 2, request=1) == [
        *in_place("0.0 0/1"),
        *compute("1.0 0/2"),
        *compute("0.0 0/1", at=f"2@{P}"),
    ]
    assert d.loaded(0) == []
    assert d.computed(0) == []
    assert d.computed(0) == ["load 0.0 0/3", *compute("0.0 0/3", at=f"2@{P}")]
    assert d.loaded(1) == []
    assert d.computed(1) == [f"resume 1@{P} layer 0", "load 1.0 1/6"]
    assert (d.stats(1).loads, d.stats(2).loads, d.stats(2).reused) == (3, 1, 1)


def test_a_prefetch_of_a_request_that_is_not_in_the_step_makes_room() -> None:
    d = Driver(workers=2, group=2, layers=2)
    d.open(1)
    assert d.predict(0, 1, 2, request=1) == ["load 0.0 0/1", "load 1.0 0/2"]
    d.open(2)  # its first pass begins without the other's
    assert d.predict(0, 3, 1, request=2) == ["evict 0.0 0/1", "load 0.0 0/3", "evict 1.0 0/2", "load 1.0 0/1"]
    assert d.gate(0, 3, 1, request=2) == [
        *compute("1.0 0/1", at=f"2@{P}"),
        *compute("0.0 0/3", at=f"2@{P}"),
    ]
    d.loaded(0, 1)
    assert d.computed(1) == ["load 1.0 0/2"]
    assert d.computed(0) == [f"resume 2@{P} layer 0", "load 0.0 0/1"]


# --- a large cluster --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, True])
def test_a_thousand_workers_serve_61_layers_of_256_experts(everything: bool) -> None:
    """DeepSeek-V3's shape: one prefill and decode passes with a shadow that is right nine times in ten."""
    layers, experts, top_k, prompt = 61, 256, 8, 4
    fields = {"residency": Everything(), "slots": 16} if everything else {}
    d = Driver(workers=1000, group=top_k, layers=layers, experts=experts, **fields)
    rng, ended = Random(1), set()

    def arrive() -> None:
        while begun := {load.load_id for load in d.in_slots.values()} - ended:
            ended.update(begun)
            for load_id in sorted(begun):
                d.do(t.LoadEnded(load_id, 1))

    def through(at: int, layer: int, named: list[int], guess: list[int] | None) -> None:
        if guess is not None:
            d.predict(layer, *guess, at=at)
        d.gate(layer, *named, at=at)
        for place in d.busy:
            d.do(t.LoadEnded(d.in_slots[place].load_id, 1))
            d.computed(place[0], slot=place[1])
        assert d.raw[0] == t.Resume(t.Visit(1, at, layer))
        d.calls.clear()

    d.prefill(prompt)
    for layer in range(layers):
        arrive()
        through(0, layer, rng.sample(range(experts), 30), None)
    for index in range(3):
        d.token(index, prompt=prompt)
        for layer in range(layers):
            named = rng.sample(range(experts), top_k)
            guess = [e if rng.random() < 0.9 else (e + 1) % experts for e in named]
            through(prompt + index, layer, named, list(dict.fromkeys(guess)))
    stats = d.stats()
    assert stats.overall.activated == 3 * layers * top_k
    assert 0.85 < (stats.overall.recall or 0) < 0.95
    if everything:
        assert (stats.loads, stats.decode_loads, stats.decode_reused) == (layers * experts, 0, 3 * layers * top_k)
        assert len(d.in_slots) == layers * experts
    else:
        assert (stats.reused, d.in_slots) == (0, {})
        assert stats.decode_loads >= 3 * layers * top_k

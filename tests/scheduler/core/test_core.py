"""The scheduler's state machine without a cluster: facts in, the exact list of commands out.

Commands are compared as short lines: `load 2.0 5/3` is worker 2, slot 0, layer 5, expert 3; `1@8` is request 1 in the
pass that begins at position 8. Ids are the scheduler's own business: the driver answers whatever ids it was given.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

from scheduler import types as t
from scheduler.alignment import Alignment
from scheduler.core.groups import RoundRobin
from scheduler.core.machine import MAX_FAILURES, Core
from scheduler.core.stats import RequestStats
from scheduler.errors import ConfigError
from scheduler.policies.placement import DeviceOnly
from scheduler.policies.precision import Full
from scheduler.policies.predictors.base import Silent
from scheduler.policies.residency.base import Cacheless
from scheduler.policies.routers import TopK
from scheduler.policies.strategy import Strategy

P = 60
"""Prompt tokens: decoding begins with worker 0 whether 1, 2, 3, 4, 5, 6, 8 or 12 workers stand in the ring."""


def line(c: t.Command) -> str:
    match c:
        case t.Load():
            return f"load {c.worker}.{c.slot} {c.expert.layer}/{c.expert.expert}{' ' + c.form if c.form else ''}"
        case t.Evict():
            return f"evict {c.worker}.{c.slot} {c.expert.layer}/{c.expert.expert}"
        case t.Compute():
            assert c.visit.layer == c.expert.layer
            where = f"{c.worker}.{c.slot} {c.expert.layer}/{c.expert.expert}"
            last = " last" if c.evict else ""
            return f"compute {where} {c.visit.request}@{c.visit.position} {c.start}:{c.stop}{last}"
        case t.Resume():
            return f"resume {c.visit.request}@{c.visit.position} layer {c.visit.layer}"
        case t.Follow():
            return f"follow {c.request} from {c.step}"
        case t.Align():
            return f"align {c.request} step {c.step}{' token' if c.token else ''} kv {c.kv_start}:{c.kv_stop}"
        case t.Unfollow():
            return f"unfollow {c.request}"
        case t.Fail():
            return f"fail {c.request}: {c.reason}"
        case t.Route():
            rows = " | ".join(" ".join(map(str, row)) for row in c.experts)
            here = " ".join(map(str, c.resident))
            return (
                f"route {c.visit.request}@{c.visit.position} layer {c.visit.layer}: {rows or 'as chosen'}, here {here}"
            )


class Driver:
    """A core, and a record of what stands in every slot according to its commands. A worker without slots is a host.

    `predictor` and so on: the strategy's five objects; those not given are OD-MoE's.
    """

    def __init__(
        self, workers: int = 8, slots: int = 1, group: int = 2, layers: int = 6, experts: int = 8,
        mini_batch: int = 128, periods: tuple[int, int] = (1, 1), shadow: bool = True, by_layer: tuple[int, ...] = (),
        mixed: tuple[int, ...] = (), prefill: str = "ahead", predictor: Any = None, residency: Any = None,
        router: Any = None, split: Any = None, precision: Any = None, top_k: int = 2,
    ) -> None:  # fmt: skip
        shape = t.ModelShape(tuple(range(layers)), experts, top_k=top_k, by_layer=by_layer)
        strategy = Strategy(
            predictor or Silent(shape), residency or Cacheless(), router or TopK(), split or DeviceOnly(),
            precision or Full(), predicts=predictor is not None,
        )  # fmt: skip
        self.core = Core(shape, RoundRobin(group), Alignment(*periods), mini_batch, strategy, prefill)
        self.held: dict[tuple[int, int], t.Load] = {}
        self.calls: dict[tuple[int, int], list[t.Compute]] = defaultdict(list)
        self.raw: list[t.Command] = []
        self.now = 0.0
        self.hosts: set[int] = set()
        for worker, size in enumerate(mixed or (slots,) * workers):
            assert self.do(t.WorkerJoined(worker, size)) == []
            self.hosts |= {worker} if size == 0 else set()
        if shadow:
            assert self.do(t.ShadowJoined()) == []

    def do(self, event: t.Event) -> list[str]:
        self.raw = self.core.handle(event, self.now)
        for c in self.raw:
            if isinstance(c, t.Load):
                assert (c.worker, c.slot) not in self.held, f"{c} into a slot that is taken"
                self.held[c.worker, c.slot] = c
            elif isinstance(c, t.Evict):
                assert self.held.pop((c.worker, c.slot)).expert == c.expert
                self.calls.pop((c.worker, c.slot), None)
            elif isinstance(c, t.Compute):
                assert c.worker in self.hosts or self.held[c.worker, c.slot].expert == c.expert
                self.calls[c.worker, c.slot].append(c)
        return [line(c) for c in self.raw]

    def open(self, request: int = 1, prompt: int = P, decode: bool = True) -> list[str]:
        """Opens a request; `decode`: as if its prefill were over and its first decode pass had begun."""
        out = self.do(t.RequestOpened(request, prompt))
        if decode:
            out += self.token(0, request, prompt)
        return out

    def token(self, index: int, request: int = 1, prompt: int = P) -> list[str]:
        out = self.do(t.TokenDecoded(request, index))
        return out + self.do(t.PassStarted(request, prompt + index, 1, prefill=False))

    def predict(self, layer: int, *experts: int, at: int = P, request: int = 1) -> list[str]:
        return self.do(t.Predicted(request, at, layer, experts))

    def gate(
        self, layer: int, *experts: int, at: int = P, request: int = 1, rows: dict[int, int] | None = None,
        scores: tuple[tuple[float, ...], ...] = (), chosen: tuple[tuple[int, ...], ...] = (),
    ) -> list[str]:  # fmt: skip
        """`chosen`: in place of `experts`, for each row those that it chose."""
        named = rows or dict.fromkeys(experts, 1) or Counter(e for row in chosen for e in row)
        return self.do(t.GateFired(t.Visit(request, at, layer), tuple(sorted(named.items())), chosen, scores))

    def foresee(self, layer: int, *scores: tuple[float, ...], at: int = P, request: int = 1) -> list[str]:
        return self.do(t.Foreseen(request, at, layer, scores))

    def loaded(self, *workers: int, slot: int = 0, nbytes: int = 10) -> list[str]:
        return [c for w in workers for c in self.do(t.LoadEnded(self.held[w, slot].load_id, nbytes))]

    def load_failed(self, worker: int, reason: str = "disk") -> list[str]:
        return self.do(t.LoadFailed(self.held[worker, 0].load_id, reason))

    def computed(self, *workers: int, slot: int = 0) -> list[str]:
        """The oldest computation of each worker's slot has ended."""
        out = []
        for worker in workers:
            call = self.calls[worker, slot].pop(0)
            if call.evict:
                del self.held[worker, slot]
            out += self.do(t.ComputeEnded(call.call_id))
        return out

    def lose(self, worker: int, reason: str = "cable") -> list[str]:
        for place in [place for place in self.held if place[0] == worker]:
            del self.held[place]
            self.calls.pop(place, None)
        return self.do(t.WorkerLost(worker, reason))

    @property
    def where(self) -> dict[int, tuple[int, int]]:
        """Worker -> what stands in its slot 0."""
        return {worker: tuple(load.expert) for (worker, slot), load in self.held.items() if slot == 0}

    def stats(self, request: int = 1) -> RequestStats:
        return self.core.stats[request]


def compute(*places: str, at: str = f"1@{P}") -> list[str]:
    return [f"compute {place} {at} 0:1 last" for place in places]


# --- the commands themselves ------------------------------------------------------------------------------------


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


# --- decoding: the paper's pipeline -----------------------------------------------------------------------------


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
    assert [tally.recall for tally in stats.by_index] == [1.0, 1.0]


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
            f"load {a}.0 {layer}/2", f"compute {a}.0 {layer}/2 {at} 0:1 last",
            f"load {b}.0 {layer}/6", f"compute {b}.0 {layer}/6 {at} 0:1 last",
        ]  # fmt: skip
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
    assert (d.stats().loads, d.stats().reloads, d.held) == (8, 0, {})


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
    assert d.held == {}


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


# --- what the gate names comes first ----------------------------------------------------------------------------


def test_a_named_expert_displaces_a_prediction_which_comes_back() -> None:
    d = Driver(workers=4, group=2, layers=2)
    d.open()
    d.predict(0, 3, 5)
    d.predict(1, 1, 2)
    d.loaded(0, 1, 2)
    assert d.gate(0, 3, 4, 5) == [*compute("0.0 0/3", "1.0 0/5"), "evict 2.0 1/1", "load 2.0 0/4", *compute("2.0 0/4")]
    assert (d.stats().preempted, d.stats().reloads, d.stats().unused) == (1, 1, 0)
    assert d.loaded(2) == []
    assert d.computed(2) == ["load 2.0 1/1"]
    assert d.computed(0, 1) == [f"resume 1@{P} layer 0"]
    assert d.gate(1, 1, 2) == compute("2.0 1/1", "3.0 1/2")
    assert d.computed(2, 3) == [f"resume 1@{P} layer 1"]
    assert (d.stats().loads, d.stats().reloads) == (6, 1)


def test_the_furthest_prediction_is_the_one_displaced() -> None:
    d = Driver(workers=1, slots=3, group=1, layers=3)
    d.open()
    assert d.predict(0, 0) + d.predict(1, 1) + d.predict(2, 2) == ["load 0.0 0/0", "load 0.1 1/1"]
    assert d.loaded(0) == ["load 0.2 2/2"]
    d.loaded(0, slot=1)
    d.loaded(0, slot=2)
    assert d.gate(0, 0, 7) == [*compute("0.0 0/0"), "evict 0.2 2/2", "load 0.2 0/7", *compute("0.2 0/7")]
    assert d.computed(0, slot=0) == ["load 0.0 2/2"]


def test_a_second_displacement_takes_the_next_furthest_and_they_return_nearest_first() -> None:
    d = Driver(workers=1, slots=2, group=1, layers=3)
    d.open()
    assert d.predict(1, 1) + d.predict(2, 2) == ["load 0.0 1/1", "load 0.1 2/2"]
    d.loaded(0)
    d.loaded(0, slot=1)
    assert d.gate(0, 4, 5) == [
        "evict 0.1 2/2", "load 0.1 0/4", *compute("0.1 0/4"),
        "evict 0.0 1/1", "load 0.0 0/5", *compute("0.0 0/5"),
    ]  # fmt: skip
    assert d.computed(0, slot=1) == ["load 0.1 1/1"]
    assert d.computed(0, slot=0) == [f"resume 1@{P} layer 0", "load 0.0 2/2"]


def test_a_load_under_way_for_a_named_expert_is_never_displaced() -> None:
    d = Driver(workers=1, group=1, layers=2)
    d.open()
    d.predict(0, 3)
    assert d.gate(0, 3, 4) == compute("0.0 0/3")
    assert d.loaded(0) == []
    assert d.computed(0) == ["load 0.0 0/4", *compute("0.0 0/4")]


def test_a_displaced_prediction_that_turns_out_wrong_is_not_loaded_again() -> None:
    d = Driver(workers=1, group=1, layers=2)
    d.open()
    d.predict(1, 6)
    assert d.gate(0, 2) == ["evict 0.0 1/6", "load 0.0 0/2", *compute("0.0 0/2")]
    assert d.computed(0) == [f"resume 1@{P} layer 0", "load 0.0 1/6"]
    assert d.gate(1, 7) == ["evict 0.0 1/6", "load 0.0 1/7", *compute("0.0 1/7")]


# --- predictions that come late, twice, or for nothing ----------------------------------------------------------


def test_late_predictions_are_only_counted() -> None:
    d = Driver(layers=3)
    d.open()
    d.gate(0, 3, 5)
    assert d.predict(0, 3, 4) == []  # while the layer is under way
    d.computed(0, 1)
    d.gate(1, 2)
    d.computed(2)
    assert d.predict(1, 2, 7) == []  # when the layer is over
    d.gate(2, 1)
    d.computed(4)
    d.token(1)
    assert d.predict(2, 1, at=P) == []  # when the pass is over
    assert (d.stats().late, d.stats().reloads, d.held) == (3, 4, {})
    # They count for recall all the same, which asks whether the shadow was right: 1 of 2, 1 of 1, 1 of 1.
    assert (d.stats().overall.correct, d.stats().overall.activated) == (3, 4)


def test_a_prediction_for_a_layer_that_is_over_leaves_the_slots_to_others() -> None:
    d = Driver(workers=1, group=1, layers=2)
    d.open()
    d.gate(0, 3)
    d.computed(0)
    assert d.predict(0, 5) == []
    assert d.predict(1, 6) == ["load 0.0 1/6"]


def test_a_second_prediction_replaces_the_first() -> None:
    d = Driver()
    d.open()
    assert d.predict(0, 3, 5) == ["load 0.0 0/3", "load 1.0 0/5"]
    assert d.predict(0, 3, 6) == ["evict 1.0 0/5", "load 1.0 0/6"]
    assert d.gate(0, 3, 6) == compute("0.0 0/3", "1.0 0/6")


def test_predictions_for_requests_that_are_not_open_are_nothing() -> None:
    d = Driver()
    assert d.predict(0, 3, 5) == []
    d.open()
    d.do(t.RequestClosed(1))
    assert d.predict(0, 3, 5) == []


# --- prefill ----------------------------------------------------------------------------------------------------


def finish_prefill(d: Driver, layers: range, experts: int) -> list[str]:
    """Fires gates, ends every load and computation: what was loaded, as `worker layer/expert`."""
    lines: list[str] = []
    for layer in layers:
        if not any(d.calls.values()):
            lines += d.gate(layer, at=0, rows=dict.fromkeys(range(experts), 1))
        while any(d.calls.values()):
            worker = min(place[0] for place, calls in d.calls.items() if calls)
            lines += d.loaded(worker) + d.computed(worker)
    return [x.removeprefix("load ").replace(".0", "") for x in lines if x.startswith("load")]


def prefilling(d: Driver, prompt: int = 16, request: int = 1) -> list[str]:
    d.open(request, prompt, decode=False)
    return d.do(t.PassStarted(request, 0, prompt, prefill=True))


def test_prefill_gives_each_worker_one_expert_of_every_layer() -> None:
    """Section 3.3 on the paper's testbed: 8 experts, 8 workers."""
    d = Driver(workers=8, experts=8, layers=3)
    assert prefilling(d) == [f"load {e}.0 0/{e}" for e in range(8)]
    d.loaded(*range(8))
    for layer in range(3):
        assert d.where == {e: (layer, e) for e in range(8)}
        out = d.gate(layer, at=0, rows=dict.fromkeys(range(8), 4))
        assert out == [f"compute {e}.0 {layer}/{e} 1@0 0:4 last" for e in range(8)]
        for e in range(8):  # a worker that is done loads for the next layer at once
            ahead = [f"load {e}.0 {layer + 1}/{e}"] if layer < 2 else []
            assert d.computed(e) == [f"resume 1@0 layer {layer}"] * (e == 7) + ahead
    assert d.held == {}
    stats = d.stats()
    assert (stats.loads, stats.decode_loads, stats.reloads, stats.unused) == (24, 0, 0, 0)
    assert stats.by_index == []  # no predictions in prefill, so no recall either


def test_prefill_loads_only_experts_that_a_layer_has() -> None:
    """Layers of two, four and one expert."""
    d = Driver(workers=4, experts=4, layers=3, by_layer=(2, 4, 1))
    assert prefilling(d) == ["load 0.0 0/0", "load 1.0 0/1", "load 2.0 1/2", "load 3.0 1/3"]
    later = {line.split()[-1] for line in finish_prefill(d, range(3), 1)}
    assert later == {"1/0", "1/1", "2/0"}
    assert d.held == {}


def test_prefill_drops_what_is_not_activated_and_loads_ahead_in_its_place() -> None:
    d = Driver(workers=4, experts=4, layers=3)
    assert prefilling(d) == ["load 0.0 0/0", "load 1.0 0/1", "load 2.0 0/2", "load 3.0 0/3"]
    d.loaded(0, 1, 2)
    assert d.gate(0, at=0, rows={0: 3, 2: 5}) == [
        "evict 1.0 0/1", "evict 3.0 0/3",
        "compute 0.0 0/0 1@0 0:3 last", "compute 2.0 0/2 1@0 0:5 last",
        "load 1.0 1/1", "load 3.0 1/3",
    ]  # fmt: skip
    assert d.computed(0) == ["load 0.0 1/0"]
    assert d.computed(2) == ["resume 1@0 layer 0", "load 2.0 1/2"]
    assert d.gate(1, at=0, rows={1: 1, 3: 1}) == [
        "evict 0.0 1/0", "evict 2.0 1/2", "compute 1.0 1/1 1@0 0:1 last", "compute 3.0 1/3 1@0 0:1 last",
        "load 0.0 2/0", "load 2.0 2/2",
    ]  # fmt: skip
    assert (d.stats().unused, d.stats().reloads) == (4, 0)


def test_prefill_with_more_experts_than_workers_shares_them_evenly() -> None:
    d = Driver(workers=3, experts=4, layers=3, slots=1)
    assert prefilling(d) == ["load 0.0 0/0", "load 1.0 0/1", "load 2.0 0/2"]
    loads = ["0 0/0", "1 0/1", "2 0/2", *finish_prefill(d, range(3), 4)]
    # 12 experts, 3 workers: four each, the start of each layer moved on by one.
    assert sorted(loads) == [
        "0 0/0", "0 0/3", "0 1/2", "0 2/1",
        "1 0/1", "1 1/0", "1 1/3", "1 2/2",
        "2 0/2", "2 1/1", "2 2/0", "2 2/3",
    ]  # fmt: skip
    assert (d.held, d.stats().reloads) == ({}, 0)


@pytest.mark.parametrize(
    ("mini_batch", "ranges"),
    [
        (4, ["0:4", "4:8", "8:10 last"]),
        (5, ["0:5", "5:10 last"]),
        (9, ["0:9", "9:10 last"]),
        (10, ["0:10 last"]),
        (128, ["0:10 last"]),
        (1, [*(f"{i}:{i + 1}" for i in range(9)), "9:10 last"]),
    ],
)
def test_mini_batches_tile_the_rows_and_only_the_last_evicts(mini_batch: int, ranges: list[str]) -> None:
    d = Driver(workers=1, experts=1, layers=2, mini_batch=mini_batch)
    assert prefilling(d) == ["load 0.0 0/0"]
    d.loaded(0)
    assert d.gate(0, at=0, rows={0: 10}) == [f"compute 0.0 0/0 1@0 {r}" for r in ranges]
    for _ in ranges[:-1]:
        assert d.computed(0) == []
    assert d.computed(0) == ["resume 1@0 layer 0", "load 0.0 1/0"]


def test_prefill_stalls_are_kept_apart() -> None:
    d = Driver(workers=1, experts=1, layers=1)
    prefilling(d)
    d.now = 2.0
    d.gate(0, at=0, rows={0: 4})
    d.now = 9.0
    d.loaded(0)
    assert (d.stats().stall_s, d.stats().prefill_stall_s) == (0.0, 7.0)


def test_a_worker_lost_in_prefill_does_not_have_a_layer_assigned_twice() -> None:
    """With 5 workers two layers of 4 experts are assigned ahead, with 4 workers one."""
    d = Driver(workers=5, experts=4, layers=5)
    loads = [x.removeprefix("load ").replace(".0", "") for x in prefilling(d)]
    d.gate(0, at=0, rows=dict.fromkeys(range(4), 1))
    assert d.lose(4) == []  # its expert 0 of layer 1 goes to a worker that is busy
    loads += finish_prefill(d, range(5), 4)
    assert d.held == {}
    everything = [f"{layer}/{expert}" for layer in range(5) for expert in range(4)]
    assert sorted(x.split()[1] for x in loads) == sorted([*everything, "1/0"])
    assert d.stats().reloads == 0
    assert d.do(t.RequestClosed(1)) == ["unfollow 1"]  # and nothing to evict


def test_a_worker_that_joins_in_prefill_leaves_no_layer_out() -> None:
    d = Driver(workers=4, experts=4, layers=6)
    prefilling(d)
    d.do(t.WorkerJoined(4, 1))
    finish_prefill(d, range(6), 4)
    assert (d.stats().loads, d.stats().reloads, d.held) == (24, 0, {})


# --- several requests -------------------------------------------------------------------------------------------


def test_a_request_closed_in_the_middle_of_a_layer_takes_only_its_own_along() -> None:
    d = Driver(workers=4, group=1, layers=2)
    d.open(1)
    d.open(2)
    assert d.predict(0, 3, request=1) + d.predict(1, 4, request=1) == ["load 0.0 0/3", "load 1.0 1/4"]
    assert d.predict(0, 5, request=2) == []  # its turn is worker 0's as well
    d.gate(0, 3, 6, request=1)  # 3 on worker 0, 6 on the next free one
    assert d.where == {0: (0, 3), 1: (1, 4), 2: (0, 6)}
    assert d.do(t.RequestClosed(1)) == ["evict 0.0 0/3", "evict 2.0 0/6", "evict 1.0 1/4", "unfollow 1", "load 0.0 0/5"]
    assert d.do(t.RequestClosed(1)) == []
    assert d.gate(0, 5, request=2) == compute("0.0 0/5", at=f"2@{P}")
    assert d.computed(0) == [f"resume 2@{P} layer 0"]
    assert d.held == {}


def test_two_requests_take_turns_over_the_same_workers() -> None:
    d = Driver(workers=2, group=2, layers=2)
    d.open(1)
    d.open(2)
    assert d.predict(0, 1, 2, request=1) == ["load 0.0 0/1", "load 1.0 0/2"]
    assert d.predict(0, 1, 3, request=2) == []  # the same expert for another request is another need
    assert d.predict(1, 6, 7, request=1) == []
    assert d.gate(0, 1, 3, request=2) == [
        "evict 0.0 0/1", "load 0.0 0/1", *compute("0.0 0/1", at=f"2@{P}"),
        "evict 1.0 0/2", "load 1.0 0/3", *compute("1.0 0/3", at=f"2@{P}"),
    ]  # fmt: skip
    assert d.gate(0, 1, 2, request=1) == []  # both slots compute what was named before
    assert d.computed(0) == ["load 0.0 0/1", *compute("0.0 0/1")]
    assert d.computed(1) == [f"resume 2@{P} layer 0", "load 1.0 0/2", *compute("1.0 0/2")]
    assert d.computed(0) == ["load 0.0 1/6"]
    assert d.computed(1) == [f"resume 1@{P} layer 0", "load 1.0 1/7"]
    assert (d.stats(1).loads, d.stats(2).loads) == (6, 2)
    assert (d.stats(1).preempted, d.stats(2).preempted) == (2, 0)
    assert (d.stats(1).reloads, d.stats(2).reloads) == (0, 0)


# --- workers that are lost --------------------------------------------------------------------------------------


def test_an_idle_worker_is_lost_without_consequence() -> None:
    d = Driver(workers=3)
    d.open()
    assert d.lose(1) == []
    assert d.core.workers == [0, 2]
    assert d.lose(1) == []
    assert d.predict(0, 3, 5) == ["load 0.0 0/3", "load 2.0 0/5"]


def test_what_a_lost_worker_was_loading_is_loaded_elsewhere() -> None:
    d = Driver(workers=4, group=2)
    d.open()
    d.predict(0, 3, 5)
    assert d.lose(0) == ["load 2.0 0/3"]  # worker 1 is taken, 2 is free
    assert d.gate(0, 3, 5) == compute("2.0 0/3", "1.0 0/5")
    assert d.computed(2, 1) == [f"resume 1@{P} layer 0"]
    assert (d.stats().loads, d.stats().reloads) == (3, 0)


def test_what_a_lost_worker_was_computing_is_computed_elsewhere_once() -> None:
    d = Driver(workers=4, group=2, mini_batch=1)
    d.open()
    d.predict(0, 3, 5)
    stale_load = d.held[0, 0].load_id
    d.gate(0, rows={3: 2, 5: 1})
    d.loaded(0, 1)
    first, second = d.calls[0, 0]
    assert d.computed(0) == []  # one of its two rows is back
    assert d.lose(0) == ["load 2.0 0/3", f"compute 2.0 0/3 1@{P} 0:1", f"compute 2.0 0/3 1@{P} 1:2 last"]
    for stale in (t.ComputeEnded(first.call_id), t.ComputeEnded(second.call_id), t.LoadEnded(stale_load, 10)):
        assert d.do(stale) == []
    assert d.computed(1) == []
    d.loaded(2)
    assert d.computed(2) == []
    assert d.computed(2) == [f"resume 1@{P} layer 0"]
    assert (d.held, d.stats().bytes_loaded) == ({}, 30)


def test_what_a_lost_worker_had_still_to_load_goes_elsewhere_named_before_predicted() -> None:
    d = Driver(workers=2, group=1, layers=4)
    d.open()
    d.predict(0, 1, 2)  # worker 0, one after the other
    d.predict(1, 3)  # worker 1
    d.predict(2, 4)  # worker 0
    d.gate(0, 1, 2)
    assert d.lose(0) == ["evict 1.0 1/3", "load 1.0 0/1", *compute("1.0 0/1")]
    assert d.computed(1) == ["load 1.0 0/2", *compute("1.0 0/2")]
    assert d.computed(1) == [f"resume 1@{P} layer 0", "load 1.0 1/3"]
    assert d.gate(1, 3) == compute("1.0 1/3")
    assert d.computed(1) == [f"resume 1@{P} layer 1", "load 1.0 2/4"]


def test_the_last_worker_lost_fails_every_request_with_the_reason() -> None:
    d = Driver(workers=2, group=1)
    d.open(1)
    d.open(2)
    d.predict(0, 3)
    d.gate(0, 3)
    assert d.lose(1) == []
    assert d.lose(0, "power cut") == [
        "unfollow 1", "fail 1: the last worker is gone: power cut",
        "unfollow 2", "fail 2: the last worker is gone: power cut",
    ]  # fmt: skip
    assert d.gate(1, 3) == []
    assert d.do(t.RequestClosed(1)) == []
    assert d.open(3, decode=False) == ["follow 3 from 0", "unfollow 3", "fail 3: no worker is connected"]
    assert d.do(t.WorkerJoined(0, 1)) == []
    d.open(4)
    assert d.predict(0, 3, request=4) == ["load 0.0 0/3"]


def test_a_worker_that_joins_again_takes_part_again() -> None:
    d = Driver(workers=2, group=2)
    d.open()
    d.predict(0, 3, 5)
    assert d.lose(1) == []  # worker 0's slot is taken
    assert d.do(t.WorkerJoined(1, 1)) == []
    assert d.gate(0, 3, 5) == compute("0.0 0/3")
    assert d.computed(0) == ["load 0.0 0/5", *compute("0.0 0/5")]
    assert d.predict(1, 6, 7) == ["load 1.0 1/7"]


def test_a_loss_stalls_until_the_last_load_and_counts_each_second_once() -> None:
    d = Driver(workers=2, group=1)
    d.open()
    d.now = 100.0
    d.gate(0, 3)
    d.now = 101.0
    d.loaded(0)
    assert d.stats().stall_s == 1.0
    d.now = 102.0
    d.lose(0)
    d.now = 104.0
    d.loaded(1)
    assert d.stats().stall_s == 4.0  # from the gate at 100 until the last load at 104


# --- what fails -------------------------------------------------------------------------------------------------


def test_a_failed_load_is_tried_on_another_worker() -> None:
    d = Driver(workers=3, group=1)
    d.open()
    d.predict(0, 3)
    assert d.load_failed(0) == ["evict 0.0 0/3", "load 1.0 0/3"]
    assert d.load_failed(1) == ["evict 1.0 0/3", "load 0.0 0/3"]
    assert d.gate(0, 3) == compute("0.0 0/3")
    assert d.computed(0) == [f"resume 1@{P} layer 0"]


def test_an_expert_that_fails_too_often_fails_its_request_only() -> None:
    d = Driver(workers=1, group=1, layers=2)
    d.open(1)
    d.open(2)
    d.predict(0, 3)
    d.predict(1, 4, request=2)
    d.gate(0, 3)
    for _ in range(MAX_FAILURES - 1):
        assert d.load_failed(0, "checksum") == ["evict 0.0 0/3", "load 0.0 0/3", *compute("0.0 0/3")]
    failed = f"fail 1: expert 3 of layer 0 failed {MAX_FAILURES} times: checksum"
    assert d.load_failed(0, "checksum") == ["evict 0.0 0/3", "unfollow 1", failed, "load 0.0 1/4"]
    assert d.gate(1, 4, request=2) == compute("0.0 1/4", at=f"2@{P}")
    assert d.computed(0) == [f"resume 2@{P} layer 1"]


def test_a_prediction_that_cannot_be_loaded_costs_time_only() -> None:
    d = Driver(workers=1, group=1, layers=2)
    d.open()
    d.predict(0, 3)
    for _ in range(MAX_FAILURES - 1):
        assert d.load_failed(0, "no such expert") == ["evict 0.0 0/3", "load 0.0 0/3"]
    assert d.load_failed(0, "no such expert") == ["evict 0.0 0/3"]
    assert d.gate(0, 3) == ["load 0.0 0/3", *compute("0.0 0/3")]
    assert d.core.stats[1].reloads == 0
    assert d.computed(0) == [f"resume 1@{P} layer 0"]


def test_a_failed_computation_is_loaded_and_computed_again_in_full() -> None:
    d = Driver(workers=2, group=1, experts=2, mini_batch=2)
    d.open()
    d.gate(0, rows={1: 5})
    d.loaded(0)
    first, second, third = d.calls[0, 0]
    d.computed(0)
    again = [f"compute 1.0 0/1 1@{P} {r}" for r in ("0:2", "2:4", "4:5 last")]
    assert d.do(t.ComputeFailed(second.call_id, "nan")) == ["evict 0.0 0/1", "load 1.0 0/1", *again]
    assert d.do(t.ComputeEnded(third.call_id)) == []
    assert d.do(t.ComputeFailed(third.call_id, "late")) == []
    assert d.do(t.ComputeEnded(first.call_id)) == []
    assert d.computed(1, 1) == []
    assert d.computed(1) == [f"resume 1@{P} layer 0"]
    assert d.held == {}


def test_computations_that_fail_too_often_fail_the_request() -> None:
    d = Driver(workers=2, group=1)
    d.open()
    d.gate(0, 3)
    for n in range(MAX_FAILURES):
        out = d.do(t.ComputeFailed(d.calls[n % 2, 0][0].call_id, "out of memory"))
    assert out == [
        "evict 0.0 0/3",
        "unfollow 1",
        f"fail 1: expert 3 of layer 0 failed {MAX_FAILURES} times: out of memory",
    ]
    assert d.held == {}


def test_facts_about_what_is_over_are_ignored() -> None:
    d = Driver(workers=2)
    d.open()
    d.predict(0, 3, 5)
    dropped = d.held[1, 0].load_id
    d.gate(0, 3)
    call = d.calls[0, 0][0].call_id
    d.computed(0)
    done = [
        t.LoadEnded(dropped, 10), t.LoadFailed(dropped, "x"), t.ComputeEnded(call), t.ComputeFailed(call, "x"),
        t.LoadEnded(987), t.LoadFailed(987, "x"), t.ComputeEnded(987), t.ComputeFailed(987, "x"),
        t.WorkerLost(9, "x"), t.RequestClosed(9), t.TokenDecoded(9, 0), t.PassStarted(9, 0, 4, True),
        t.GateFired(t.Visit(9, 0, 0), ((1, 1),)), t.Predicted(9, 0, 0, (1,)),
    ]  # fmt: skip
    assert [d.do(event) for event in done] == [[]] * len(done)
    assert d.stats().bytes_loaded == 0


def test_a_result_before_the_word_of_its_load_says_that_it_was_loaded() -> None:
    d = Driver(workers=1, group=1)
    d.open()
    d.now = 1.0
    d.gate(0, 3)
    load = d.held[0, 0].load_id
    d.now = 4.0
    assert d.computed(0) == [f"resume 1@{P} layer 0"]
    assert d.do(t.LoadEnded(load, 10)) == []
    assert d.stats().stall_s == 3.0


# --- the shadow -------------------------------------------------------------------------------------------------


def test_a_shadow_that_joins_late_takes_up_every_open_request() -> None:
    d = Driver(shadow=False)
    assert d.open(1, prompt=10, decode=False) == []
    assert d.open(2, prompt=20) == []
    assert d.token(1, 2, 20) + d.token(2, 2, 20) == []
    assert d.open(3, prompt=30) == []
    d.do(t.RequestClosed(3))
    # Request 2 has decoded tokens 0 to 2: pass 2 reads the third and stands on 20 + 2 KV rows.
    assert d.do(t.ShadowJoined()) == ["follow 1 from 0", "follow 2 from 2", "align 2 step 2 token kv 0:22"]
    assert d.do(t.TokenDecoded(1, 0)) == ["align 1 step 0 token kv 0:10"]
    assert d.do(t.TokenDecoded(2, 3)) == ["align 2 step 3 token kv 22:23"]


def test_a_shadow_that_is_lost_is_told_nothing_and_its_predictions_stand() -> None:
    d = Driver(layers=2)
    d.open()
    d.predict(0, 3, 5)
    assert d.do(t.ShadowLost()) == []
    assert d.gate(0, 3, 5) == compute("0.0 0/3", "1.0 0/5")
    d.computed(0, 1)
    assert d.gate(1, 4) == ["load 2.0 1/4", *compute("2.0 1/4")]
    d.computed(2)
    assert d.token(1) == []
    assert d.open(2, decode=False) == []
    assert d.do(t.ShadowJoined()) == ["follow 1 from 1", f"align 1 step 1 token kv 0:{P + 1}", "follow 2 from 0"]
    assert d.do(t.RequestClosed(2)) == ["unfollow 2"]


HAND = {
    (1, 1): ["token kv 0:5", "token kv 5:6", "token kv 6:7", "token kv 7:8", "token kv 8:9", "token kv 9:10"],
    (0, 0): ["kv 5:5", "kv 6:6", "kv 7:7", "kv 8:8", "kv 9:9", "kv 10:10"],
    (1, 4): ["token kv 0:5", "token kv 6:6", "token kv 7:7", "token kv 8:8", "token kv 5:9", "token kv 10:10"],
    (2, 1): ["token kv 0:5", "kv 5:6", "token kv 6:7", "kv 7:8", "token kv 8:9", "kv 9:10"],
    (4, 2): ["token kv 0:5", "kv 6:6", "kv 5:7", "kv 8:8", "token kv 7:9", "kv 10:10"],
    (0, 2): ["kv 0:5", "kv 6:6", "kv 5:7", "kv 8:8", "kv 7:9", "kv 10:10"],
}


@pytest.mark.parametrize(("periods", "expected"), HAND.items(), ids=str)
def test_alignments_written_out_by_hand(periods: tuple[int, int], expected: list[str]) -> None:
    """Five prompt tokens, six decode passes."""
    d = Driver(periods=periods)
    d.open(prompt=5, decode=False)
    got = [x for index in range(6) for x in d.do(t.TokenDecoded(1, index))]
    assert got == [f"align 1 step {step} {what}" for step, what in enumerate(expected)]


@pytest.mark.parametrize("token_period", [0, 1, 2, 4])
@pytest.mark.parametrize("kv_period", [0, 1, 2, 4])
@pytest.mark.parametrize("joined_at", [0, 1, 3, 4])
def test_alignments_bring_every_kv_row_exactly_once(token_period: int, kv_period: int, joined_at: int) -> None:
    """`joined_at`: tokens decoded when the shadow comes."""
    prompt, passes = 7, 14
    d = Driver(periods=(token_period, kv_period), shadow=False)
    d.open(prompt=prompt, decode=False)
    aligns: list[t.Align] = []
    for index in range(passes):
        if index == joined_at:
            d.do(t.ShadowJoined())
            aligns += [c for c in d.raw if isinstance(c, t.Align)]
        d.do(t.TokenDecoded(1, index))
        aligns += [c for c in d.raw if isinstance(c, t.Align)]
    first = max(joined_at - 1, 0)
    assert [a.step for a in aligns] == list(range(first, passes))
    assert [a.step for a in aligns if a.token] == [
        s for s in range(first, passes) if token_period and not s % token_period
    ]
    brought = [row for a in aligns for row in range(a.kv_start, a.kv_stop)]
    due = [s for s in range(first, passes) if kv_period and not s % kv_period]
    assert brought == list(range(prompt + due[-1] if due else 0))
    assert [a.step for a in aligns if a.kv_start < a.kv_stop] == due

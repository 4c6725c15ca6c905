"""The engine with workers that lie: their outputs are finite, well-formed, intact and wrong.

The scheduler's side of an audit is a small one here: it takes the next worker at once, in a slot of its own.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from checkpoint.tensors import tensor_bytes
from main_node.checks.arbiter import Arbiter
from main_node.checks.audits import MOST_BYTES, Audits
from main_node.checks.verification import Verification
from main_node.engine import output_checks
from main_node.engine.engine import Engine, Waits
from main_node.engine.experts import RemoteExperts
from scheduler import types as t
from scheduler.alignment import Alignment
from scheduler.core.groups import RoundRobin
from scheduler.core.machine import Core
from scheduler.errors import AnswerWithdrawnError, CorruptStoreError, RequestFailedError
from support.nodes.engine_world import (
    EXPERTS,
    HELLO,
    HIDDEN,
    LAYERS,
    WAIT_S,
    Desk,
    Fake,
    Later,
    Say,
    arithmetic,
    computed,
    good,
    once,
    rows_of,
    worker_ready,
)
from wire import messages as w
from wire.machine import processor_name

pytestmark = pytest.mark.timeout(120)
SLOT, FIRST = 99, 1 << 20
Lie = Callable[[w.Compute, torch.Tensor], torch.Tensor]


class AuditingCore(Core):
    """`spare`: whether some worker is idle."""

    spare = True

    def handle(self, event: t.Event, now: float) -> list[t.Command]:
        if isinstance(event, t.AuditRequested):
            others = [worker for worker in self.workers if worker not in event.avoid]
            if not others or not self.spare:
                return [t.AuditDropped(event.audit)]
            worker, number = others[event.audit % len(others)], FIRST + 2 * event.audit
            visit = t.Visit(-event.audit, 0, event.expert.layer)
            return [
                t.Load(worker, SLOT, event.expert, number),
                t.Compute(worker, SLOT, event.expert, number + 1, visit, 0, event.rows, True),
            ]
        if isinstance(event, t.ComputeFailed) and event.call_id >= FIRST:
            return [t.AuditDropped((event.call_id - FIRST) // 2)]
        return super().handle(event, now)


class KnownTruth(Arbiter):
    """Has the fakes' arithmetic in place of a store."""

    arithmetic = ("cpu", "a processor")
    """The fakes' own, so that bits count."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.computed = 0

    def compute(
        self, expert: t.ExpertId, hidden: torch.Tensor, weights: torch.Tensor, passes: Any = ()
    ) -> torch.Tensor:
        self.computed += 1
        return arithmetic(*expert, hidden, weights)


class HeldTruth(KnownTruth):
    """Computes nothing before `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def compute(
        self, expert: t.ExpertId, hidden: torch.Tensor, weights: torch.Tensor, passes: Any = ()
    ) -> torch.Tensor:
        assert self.gate.wait(WAIT_S)
        return super().compute(expert, hidden, weights, passes)


class AuditDesk(Desk):
    def __init__(self, share: float = 1.0, patient: bool = True, arbiter: Arbiter | None = None) -> None:
        super().__init__()
        self.engine.close()
        self.core = AuditingCore(t.ModelShape(LAYERS, EXPERTS, 2, HIDDEN), RoundRobin(2), Alignment(), 128)
        self.arbiter = arbiter or KnownTruth()
        self.audits = Audits(share, patient)
        self.engine = Engine(self.core, HELLO, Waits(3600.0), verification=Verification(self.audits, self.arbiter))
        self.experts = RemoteExperts(self.engine)

    def named(self) -> dict[int, str]:
        return self.engine.peers.suspects.facts()

    def layers(self, count: int, number: int = 1, experts: tuple[int, ...] | None = None) -> None:
        """As many layers, whatever they give."""
        for turn in range(count):
            visit = turn % len(LAYERS), number, 5 + turn // len(LAYERS)
            Later(lambda turn=turn, visit=visit: self.layer(rows_of(turn, experts=experts), *visit)).result()

    def settled(self, number: int = 1) -> bool:
        """Once every audit and the arbiter have come to their ends: whether the request is free of doubt."""
        self.settle()
        return self.engine.checks.settle(number)

    def run(self, layers: int = 60, number: int = 1) -> None:
        for turn in range(layers):
            layer = LAYERS[turn % len(LAYERS)]
            self.check(rows_of(turn), layer, number, position=5 + turn // len(LAYERS))


@pytest.fixture
def desk_with(request: pytest.FixtureRequest) -> Any:
    made: list[AuditDesk] = []

    def build(**settings: Any) -> AuditDesk:
        made.append(AuditDesk(**settings))
        return made[-1]

    yield build
    for desk in made:
        desk.close()


def lying(lie: Lie, share: float = 1.0, seed: int = 0) -> Callable[[Fake, w.Message], Say]:
    """`share` of its outputs are lies."""
    rng = random.Random(seed)

    def act(fake: Fake, message: w.Compute) -> Say:
        answer = computed(message)
        if rng.random() >= share:
            return answer
        truth = torch.frombuffer(bytearray(answer.output.data), dtype=torch.float32).view(answer.output.shape)
        return replace(answer, output=w.Tensor(*tensor_bytes(lie(message, truth))))

    return once(w.Compute, act, always=True)


def another(message: w.Compute, truth: torch.Tensor) -> torch.Tensor:
    hidden, weights = (
        torch.frombuffer(bytearray(x.data), dtype=torch.float32).view(x.shape)
        for x in (message.hidden, message.weights)
    )
    return arithmetic(message.layer, (message.expert + 1) % EXPERTS, hidden, weights)


LIES: dict[str, Lie] = {
    "zeros": lambda message, truth: torch.zeros_like(truth),
    "another expert's": another,
    "scaled by 1.01": lambda message, truth: truth * 1.01,
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_liar_is_named_and_dropped_and_its_answer_withdrawn(lie: Lie, desk_with: Any, caplog: Any) -> None:
    desk = desk_with()
    desk.workers(lying(lie), good, good)
    desk.open()
    with pytest.raises(AnswerWithdrawnError, match=r"worker 0 \(process 42 on box\) gives wrong outputs: that of"):
        desk.layers(60)
    desk.engine.close_request(1)
    desk.settled()
    assert list(desk.named()) == [0]
    assert sorted(desk.engine.peers.workers) == [1, 2]
    assert "worker 0 is lost: worker 0 (process 42 on box) gives wrong outputs: that of expert" in caplog.text
    desk.open(2)
    desk.run(number=2)
    assert desk.settled(2)
    assert list(desk.named()) == [0]


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_liar_that_was_asked_for_the_audit_alone_costs_no_answer(lie: Lie, desk_with: Any) -> None:
    desk = desk_with()
    desk.workers(good, good, lying(lie))
    desk.open()
    desk.check(rows_of(1, experts=(0, 1)))
    assert desk.settled()
    assert list(desk.named()) == [2]
    desk.run()
    assert desk.settled()


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_twentieth_is_enough_to_find_a_liar_among_eight_within_200_tokens(
    seed: int, lie: Lie, desk_with: Any
) -> None:
    """Of a model with two experts in each of three layers: 1,200 computations."""
    desk = desk_with(share=0.05)
    liar = seed % 8
    desk.workers(*[lying(lie) if number == liar else good for number in range(8)])
    desk.audits.random.seed(seed)
    desk.open()
    with pytest.raises(AnswerWithdrawnError):
        desk.layers(600)
    assert list(desk.named()) == [liar]


def test_honest_workers_are_never_named_and_every_audit_is_done(desk_with: Any) -> None:
    desk = desk_with()
    desk.workers(*[good] * 4)
    desk.open()
    desk.run(layers=90)
    desk.settle()
    assert desk.named() == {}
    assert desk.arbiter.computed == 0
    assert desk.engine.checks.computations == 180
    assert desk.audits.done >= 170  # a worker's last one may still be due
    assert desk.engine.checks.settle(1)
    desk.engine.close_request(1)
    assert desk.engine.idle()


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3])
def test_as_many_are_audited_as_the_share_says(share: float, desk_with: Any) -> None:
    desk = desk_with(share=share)
    desk.audits.random = random.Random(7)  # else one run in thousands ends with several audits due at every worker
    desk.workers(*[good] * 4)
    desk.open()
    desk.run(layers=100)
    desk.settle()
    assert abs(desk.audits.done - 200 * share) <= 4


def test_answers_without_an_output_of_the_liar_go_on(desk_with: Any) -> None:
    """Worker 1 joins late, lies, and is asked for one request only."""
    desk = desk_with(share=1.0)
    desk.core.spare = False
    desk.workers(good)
    for number in (1, 2):
        desk.open(number)
        desk.run(3, number)
    desk.join(1, desk.fake(lying(LIES["zeros"])))
    desk.core.spare = True
    desk.audits._accounts.clear()
    with pytest.raises(AnswerWithdrawnError):
        desk.layers(60, 2, (0, 1))
    desk.run(3, number=1)
    assert desk.engine.checks.settle(1)
    with pytest.raises(AnswerWithdrawnError):
        desk.engine.check(2)


def test_a_withdrawn_answer_says_so_wherever_it_is(desk_with: Any) -> None:
    """Between two passes, and where only its report is left."""
    truth = HeldTruth()
    desk = desk_with(arbiter=truth)
    desk.workers(lying(LIES["zeros"]), lying(LIES["zeros"], share=0))
    desk.open()
    Later(lambda: desk.layer(rows_of(1, experts=(0, 1)))).result()
    truth.gate.set()
    desk.settled()
    with pytest.raises(AnswerWithdrawnError, match=r"request 1 failed: its tokens may be wrong, .*; ask again"):
        desk.engine.check(1)
    with pytest.raises(AnswerWithdrawnError):
        Later(lambda: desk.layer(rows_of(1), 1)).result()
    desk.engine.close_request(1)
    with pytest.raises(RequestFailedError, match="was closed"):
        desk.engine.check(1)
    assert desk.engine.idle()


def test_while_the_arbiter_computes_the_answer_is_not_called_exact(desk_with: Any, monkeypatch: Any) -> None:
    truth = HeldTruth()
    desk = desk_with(arbiter=truth)
    desk.workers(good, lying(lambda message, truth: truth + 1e-6))
    desk.open()
    Later(lambda: desk.layer(rows_of(1, experts=(0, 1)))).result()
    desk.settle()
    monkeypatch.setattr(output_checks, "SETTLE_S", 0.05)
    assert not desk.engine.checks.settle(1)
    truth.gate.set()


def test_a_difference_in_the_last_bits_is_no_lie_but_not_exact(desk_with: Any) -> None:
    desk = desk_with()
    desk.workers(good, lying(lambda message, truth: torch.nextafter(truth, truth + 1)))
    desk.open()
    desk.layers(6, experts=(0, 1))
    assert not desk.settled()
    assert desk.named() == {}
    assert sorted(desk.engine.peers.workers) == [0, 1]
    desk.engine.check(1)


def test_devices_that_round_differently_agree(desk_with: Any) -> None:
    desk = desk_with()
    gpu = once(w.Hello, lambda fake, m: replace(worker_ready(1), device="cuda:0", device_name="a card"))

    def rounded(fake: Fake, message: w.Message) -> Say:
        say = gpu if isinstance(message, w.Hello) else lying(lambda message, truth: torch.nextafter(truth, truth + 1))
        return say(fake, message)

    desk.workers(good, rounded)
    desk.open()
    desk.layers(6, experts=(0, 1))
    desk.settle()
    assert (desk.engine.checks.settle(1), desk.named(), desk.arbiter.computed) == (True, {}, 0)
    assert desk.audits.done > 0


def test_where_no_worker_is_idle_a_share_that_was_set_is_done_by_the_main_node(desk_with: Any) -> None:
    desk = desk_with(share=0.5, patient=False)
    desk.core.spare = False
    desk.workers(good, good, lying(LIES["scaled by 1.01"]))
    desk.open()
    with pytest.raises(AnswerWithdrawnError):
        desk.layers(200)
    assert list(desk.named()) == [2]


def test_the_main_node_does_all_of_a_share_that_was_set(desk_with: Any) -> None:
    desk = desk_with(share=0.1, patient=False)
    desk.core.spare = False
    desk.workers(good, good)
    desk.open()
    desk.run(layers=250)
    assert 33 <= desk.audits.done <= 51  # of 500
    assert desk.named() == {}


def test_where_no_worker_is_idle_audits_are_tried_seldom(desk_with: Any) -> None:
    desk = desk_with(share=0.01)
    desk.core.spare = False
    tried: list[t.Event] = []
    handle = desk.core.handle
    desk.core.handle = lambda event, now: tried.append(event) or handle(event, now)
    desk.workers(*[good] * 2)
    desk.open()
    desk.run(layers=300)
    assert (desk.audits.done, desk.arbiter.computed, desk.audits._cases) == (0, 0, {})
    attempts = sum(isinstance(event, t.AuditRequested) for event in tried)
    assert 5 < attempts < 40
    assert desk.audits.missed == {"busy": attempts}


def test_without_a_verdict_the_answer_is_in_doubt_and_nobody_is_named(desk_with: Any, caplog: Any) -> None:
    class Damaged(KnownTruth):
        def compute(
            self, expert: t.ExpertId, hidden: torch.Tensor, weights: torch.Tensor, passes: Any = ()
        ) -> torch.Tensor:
            raise CorruptStoreError("the main node's disk is worn")

    desk = desk_with(arbiter=Damaged())
    desk.workers(good, lying(LIES["zeros"]))
    desk.open()
    Later(lambda: desk.layer(rows_of(1, experts=(0, 1)))).result()
    assert not desk.settled()
    assert desk.named() == {}
    assert "the main node cannot compute expert" in caplog.text


def test_rows_are_kept_within_a_bound(desk_with: Any) -> None:
    audits = Audits(1.0)
    call = t.Compute(0, 0, t.ExpertId(0, 0), 1, t.Visit(1, 0, 0), 0, 1024, True)
    desk = desk_with()
    desk.workers(good)
    source = desk.engine.peers.suspects.source(0)
    audits.wants(source)
    rows = torch.zeros(1024, 128)
    numbers = [audits.begin(call, source, rows, torch.zeros(1024), rows) for _ in range(20)]
    kept = [audits.case(number) for number in numbers if number is not None]
    assert 1 <= len(kept) < 20
    assert audits.missed == {"large": 20 - len(kept)}
    assert sum(case.nbytes for case in kept if case) <= MOST_BYTES
    whole = rows.nbytes * 3 + 1024 * 4  # the second outputs come yet
    assert len(kept) == MOST_BYTES // whole
    audits.drop(1)
    assert audits.begin(call, source, rows, torch.zeros(1024), rows) is not None


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_infinity_that_only_workers_compute_is_a_lie(workers: int, desk_with: Any) -> None:
    """Accepted from the second one, refuted by the main node."""
    desk = desk_with(share=0.0)
    desk.workers(*[lying(lambda message, truth: truth * float("inf"))] * workers)
    desk.open()
    with contextlib.suppress(RequestFailedError):
        desk.layers(6, experts=(0, 1))
    desk.settled()
    with pytest.raises(RequestFailedError):
        desk.engine.check(1)
    assert desk.named()


def test_the_fakes_arithmetic_is_not_the_arbiters_own() -> None:
    assert Arbiter.arithmetic == ("cpu", processor_name())

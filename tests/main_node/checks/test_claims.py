"""Numbers that a peer claims are checked before anything is made of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from scheduler.errors import ProtocolError
from support.nodes.engine_world import WAIT_S, Desk, Fake, Say, good, once, rows_of, shadow, worker_ready
from wire import messages as w

pytestmark = pytest.mark.timeout(60)

READY = {
    "50 million slots": {"slots": 50_000_000},
    "all slots that the wire has": {"slots": 2**32 - 1},
    "more slots than memory": {"slots": 65_536, "slot_bytes": 1 << 20},
    "slots of nothing": {"slot_bytes": 0},
    "a bandwidth that is none": {"load_bytes_per_s": math.nan},
    "an infinite bandwidth": {"load_bytes_per_s": math.inf},
    "a negative cost": {"call_s": -1.0},
    "an infinite cost": {"row_s": math.inf},
    "a name without end": {"node": "x" * 100_000},
}


@pytest.mark.parametrize("claim", READY)
def test_a_worker_that_cannot_be_is_refused_by_name(claim: str, desk: Desk) -> None:
    fake = desk.fake(once(w.Hello, lambda fake, m: replace(worker_ready(1), **READY[claim])))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=r"worker 0 sent a message that cannot be: WorkerReady"):
        desk.join(0, fake)
    assert desk.core.workers == []
    assert fake.closed.wait(WAIT_S)


def test_a_shadow_that_cannot_be_is_refused_by_name(desk: Desk) -> None:
    def script(fake: Fake, message: w.Message) -> Say:
        answer = shadow(fake, message)
        return replace(answer, device_bytes=2**60) if isinstance(answer, w.ShadowReady) else answer

    with pytest.raises(ProtocolError, match=r"ShadowReady\.device_bytes is 1152921504606846976; allowed: "):
        desk.shadow(script)
    assert desk.engine.peers.shadow is None


ANSWERS: dict[str, tuple[type, Any]] = {
    "a load larger than its slot": (w.Load, lambda m: w.Loaded(m.load_id, 101, 0.0)),
    "a load of endless time": (w.Load, lambda m: w.Loaded(m.load_id, 100, math.inf)),
    "a computation of no time at all": (
        w.Compute,
        lambda m: w.Computed(m.call_id, w.Tensor("float32", (1, 8), bytes(32)), math.nan),
    ),
}


@pytest.mark.parametrize("claim", ANSWERS)
def test_a_claim_costs_the_worker_not_the_answer(claim: str, desk: Desk, caplog: Any) -> None:
    kind, answer = ANSWERS[claim]
    desk.workers(once(kind, lambda fake, m: answer(m)), good)
    desk.open()
    desk.check(rows_of(1, experts=(0, 1)))
    assert sorted(desk.engine.peers.workers) == [1]
    assert "worker 0 is lost: worker 0 sent a message that cannot be: " in caplog.text


@pytest.mark.parametrize(
    "usage", [w.WorkerUsage(2, 100, 1, 100), w.WorkerUsage(1, 100, 2, 501), w.WorkerUsage(1, 100, 2, 200, 3)]
)
def test_usage_is_checked(usage: w.WorkerUsage, desk: Desk) -> None:
    desk.workers(once(w.AskUsage, lambda fake, m: usage))
    assert desk.engine.peers.usage(WAIT_S) == ({}, None)
    assert desk.engine.peers.workers == {}

"""Audits in random worlds: whatever comes, the referee (`support/worlds/audits.py`) must find nothing wrong. And it
must notice an `AuditTable` that is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from scheduler.core.audits import AuditTable
from support.worlds.plan import Plan, eventful_plan, stepping_plan
from support.worlds.world import live


def worlds_with_audits(worlds: int, first: int = 0) -> Iterator[Plan]:
    """Any choices and faults; every other one with several requests in lock-step, every third with workers that come
    and go all the time."""
    for seed in range(first, worlds):
        plan = (eventful_plan, stepping_plan)[seed % 2](seed)
        restless = [(20 * place, ("die", "join")[place % 2], place // 2) for place in range(20)]
        faults = tuple(sorted((*plan.faults, *restless))) if seed % 3 == 0 else plan.faults
        yield replace(plan, auditing=(0.05, 0.3)[seed // 2 % 2], faults=faults)


def live_through(plans: Iterable[Plan]) -> Counter[str]:
    """In how many worlds each thing has happened."""
    runs: Counter[str] = Counter()
    for plan in plans:
        runs.update((+live(plan).referee.seen).keys())
    return runs


@pytest.mark.slow
def test_whatever_happens_the_referee_finds_nothing_wrong() -> None:
    """And the worlds reach every end that an audit can have."""
    runs = live_through(worlds_with_audits(45))
    expected = {
        "audit done": 10,
        "audit done where it is kept": 2,
        "audit dropped at once": 15,
        "audit gave way": 8,
        "audit dropped with the kept": 1,
        "audit's load failed": 2,
        "audit's computation failed": 2,
        "audit's worker lost": 1,
    }
    assert {what: runs[what] for what, least in expected.items() if runs[what] < least} == {}


def never(*_: object) -> None:
    return None


@pytest.mark.parametrize(
    ("name", "spoilt"),
    [
        ("begin", lambda self, event: self._commands.drop_audit(event.audit)),
        ("_rests", lambda self, number, event: number not in event.avoid),
        ("_may_load", lambda self, worker, expert: bool(worker.free)),
        ("_may_share", lambda self, kept, event: self._rests(kept.worker, event)),
        ("give_way", never),
        ("on_evicted", never),
        ("on_worker_lost", never),
        ("on_computed", lambda self, call_id: self.on_compute_failed(call_id)),
        ("on_compute_failed", lambda self, call_id: self.on_computed(call_id)),
        ("on_load_failed", never),
    ],
)
def test_the_referee_of_the_worlds_is_not_asleep(monkeypatch: pytest.MonkeyPatch, name: str, spoilt: Any) -> None:
    """Each of these faults of the core is found in one of a few worlds."""
    monkeypatch.setattr(AuditTable, name, spoilt)
    with pytest.raises((AssertionError, KeyError)):
        live_through(worlds_with_audits(60, 40 if name == "on_evicted" else 0))  # the other worlds hide that one


def test_the_referee_notices_a_worker_to_be_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    rests = AuditTable._rests
    monkeypatch.setattr(AuditTable, "_rests", lambda self, n, event: rests(self, n, replace(event, avoid=())))
    with pytest.raises(AssertionError):
        live_through(worlds_with_audits(60))

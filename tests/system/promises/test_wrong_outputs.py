"""Workers that answer something wrong: found, named and dropped; no wrong answer is called exact."""

from __future__ import annotations

from typing import Any

import pytest

from support.faults.outputs import Lie
from support.promises import BUSY_S

pytestmark = pytest.mark.system

ANSWERS = 12
"""Most answers until a worker that lies is named, here: 480 tokens."""


@pytest.mark.parametrize("kind", ["nan", "infinity", "bit flip", "huge", "one huge element"])
def test_an_output_that_shows_it_is_wrong(kind: str, nodes: Any, answer: Any) -> None:
    """One output, or all: it is computed again elsewhere, and a worker that goes on like that is dropped."""
    cluster = nodes.cluster(audit=0)
    nodes.workers[1].set("lie", Lie(kind, first=7, count=1))
    seen = answer(cluster)
    nodes.check_same(seen)
    assert nodes.workers[1].told() == 1
    assert cluster.lost == []
    nodes.workers[1].set("lie", Lie(kind))
    seen = answer(cluster)
    nodes.check_same(seen)
    assert seen.longest_gap_s < BUSY_S
    assert cluster.lost == ["worker 1"]
    assert "worker 1" in str(answer(cluster).report.cluster.suspects)


@pytest.mark.parametrize("kind", ["zeros", "another expert", "scaled"])
def test_an_output_that_only_a_second_computation_shows_to_be_wrong(kind: str, nodes: Any, answer: Any) -> None:
    """Found by an audit. Answers with its outputs that are still open fail by name; it is never used again."""
    cluster = nodes.cluster(audit=0.2)
    nodes.workers[1].set("lie", Lie(kind))
    seen = None
    for _ in range(ANSWERS):
        seen = answer(cluster)
        if seen.error:
            break
    assert seen is not None
    assert type(seen.error).__name__ == "AnswerWithdrawnError"
    assert "worker 1" in str(seen.error)
    assert cluster.lost == ["worker 1"]
    after = answer(cluster)
    nodes.check_same(after)
    assert after.calls_itself_exact
    assert "worker 1" in str(after.report.cluster.suspects)


def test_loads_that_are_damaged(nodes: Any, answer: Any) -> None:
    """A bit of every loaded expert is flipped: found by the store's checksum."""
    sound = nodes.workers[1]
    rogue = nodes.node("worker", 1, check_loads="all")
    nodes.later(rogue.close)
    nodes.workers[1] = rogue
    nodes.later(lambda: nodes.workers.__setitem__(1, sound))
    cluster = nodes.cluster(audit=0)
    rogue.set("load", "damaged")
    nodes.check_same(answer(cluster))


def test_an_output_of_enormous_finite_numbers(nodes: Any, answer: Any) -> None:
    """The main node computes it again at once, whatever the audits' share: the worker is named."""
    cluster = nodes.cluster()
    nodes.workers[1].set("lie", Lie("large"))
    seen = answer(cluster)
    assert type(seen.error).__name__ == "AnswerWithdrawnError"
    assert "worker 1" in str(seen.error)
    assert cluster.lost == ["worker 1"]
    nodes.check_same(answer(cluster))


def test_nobody_waits_for_workers_that_are_not_taken_back(nodes: Any, answer: Any) -> None:
    cluster = nodes.cluster(worker_wait=60.0)
    for worker in nodes.workers:
        worker.set("lie", Lie("huge"))
    errors = [answer(cluster) for _ in range(3)]
    assert all(type(seen.error).__name__ in ("AnswerWithdrawnError", "RequestFailedError") for seen in errors)
    assert "gave wrong outputs and are not taken back" in str(errors[-1].error)
    assert errors[-1].longest_gap_s < BUSY_S

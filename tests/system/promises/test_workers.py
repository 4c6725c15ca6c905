"""Workers that die, freeze, are slow or fail: the client gets the same tokens, after a pause."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest

from support.faults.processes import Supervisor
from support.promises import BUSY_S

pytestmark = pytest.mark.system

DEAD_S = 0.5
SILENT_S = 1.5


def test_a_worker_is_killed(nodes: Any, answer: Any) -> None:
    cluster = nodes.cluster()
    seen = answer(cluster, {5: nodes.workers[1].kill})
    nodes.check_same(seen)
    assert cluster.lost == ["worker 1"]
    assert seen.longest_gap_s < DEAD_S + BUSY_S


def test_a_worker_freezes(nodes: Any, answer: Any) -> None:
    cluster = nodes.cluster()
    seen = answer(cluster, {5: nodes.workers[1].freeze})
    nodes.check_same(seen)
    assert cluster.lost == ["worker 1"]
    assert seen.longest_gap_s < SILENT_S + BUSY_S


def test_a_worker_is_ten_times_as_slow(nodes: Any, answer: Any) -> None:
    cluster = nodes.cluster()
    nodes.workers[1].set("slowness", 10)
    nodes.check_same(answer(cluster))
    assert cluster.lost == []


@pytest.mark.parametrize("fault", ["out of memory", "disk error", "disk full"])
def test_every_load_of_a_worker_fails(fault: str, nodes: Any, answer: Any) -> None:
    """The other two compute what it cannot, and it serves again when the fault is over."""
    cluster = nodes.cluster()
    nodes.workers[1].set("load", fault)
    seen = answer(cluster)
    nodes.check_same(seen)
    assert seen.longest_gap_s < BUSY_S
    nodes.workers[1].set("load", None)
    nodes.check_same(answer(cluster))


def test_a_worker_has_no_memory_to_compute(nodes: Any, answer: Any) -> None:
    cluster = nodes.cluster()
    nodes.workers[1].set("compute", "out of memory")
    seen = answer(cluster)
    nodes.check_same(seen)
    assert seen.longest_gap_s < BUSY_S
    nodes.workers[1].set("compute", None)
    nodes.check_same(answer(cluster))


def test_two_workers_are_killed_at_once(nodes: Any, answer: Any) -> None:
    cluster = nodes.cluster()
    seen = answer(cluster, {5: lambda: [worker.kill() for worker in nodes.workers[:2]]})
    nodes.check_same(seen)
    assert sorted(cluster.lost) == ["worker 0", "worker 1"]
    assert seen.longest_gap_s < DEAD_S + BUSY_S


def test_a_worker_is_killed_and_started_again_and_again(nodes: Any, answer: Any) -> None:
    cluster, over = nodes.cluster(), threading.Event()
    worker = nodes.workers[1]

    def restart() -> None:
        while not over.wait(0.2):
            worker.restart()

    looping = threading.Thread(target=restart)
    looping.start()
    try:
        for _ in range(4):
            nodes.check_same(answer(cluster))
    finally:
        over.set()
        looping.join()
    assert "worker 1" in cluster.lost
    assert set(cluster.lost) == {"worker 1"}


def test_every_worker_is_killed_and_comes_back(nodes: Any, answer: Any) -> None:
    """The open answer waits for them and goes on."""
    cluster = nodes.cluster()

    def act() -> None:
        for worker in nodes.workers:
            worker.kill()
        for worker in nodes.workers:
            worker.restart(wait=False)

    nodes.check_same(answer(cluster, {5: act}))


@pytest.mark.parametrize("away_s", [2.0])
def test_every_worker_freezes_and_thaws(away_s: float, nodes: Any, answer: Any) -> None:
    cluster = nodes.cluster()

    def act() -> None:
        for worker in nodes.workers:
            worker.freeze()
            threading.Timer(away_s, worker.thaw).start()

    nodes.check_same(answer(cluster, {5: act}))


def test_every_worker_is_killed_for_good(nodes: Any, answer: Any) -> None:
    """An error with a name after --worker-wait, and so for requests that come later."""
    cluster = nodes.cluster(worker_wait=1.0)
    seen = answer(cluster, {5: lambda: [worker.kill() for worker in nodes.workers]})
    assert type(seen.error).__name__ == "RequestFailedError"
    assert seen.tokens == nodes.expected[: len(seen.tokens)]
    assert seen.longest_gap_s < 1.0 + DEAD_S + BUSY_S
    began = time.monotonic()
    assert type(answer(cluster).error).__name__ == "RequestFailedError"
    assert time.monotonic() - began < 1.0 + BUSY_S


# --- workers that die of what they are asked, never answer, or flap ---------------------------------------------------


def test_workers_that_die_at_a_layer_and_are_started_again_end_the_request(nodes: Any, answer: Any) -> None:
    """After three losses that count for one expert; that and the workers are named. Later answers are right."""
    cluster = nodes.cluster(worker_wait=20.0)
    dying = Supervisor(nodes.workers, "compute", "die at layer 1")
    began = time.monotonic()
    try:
        seen = answer(cluster)
    finally:
        dying.close()
    assert type(seen.error).__name__ == "RequestFailedError"
    assert "of layer 1 failed 3 times: worker" in str(seen.error)
    assert time.monotonic() - began < 60.0
    assert dying.deaths <= 9 + len(nodes.workers)
    nodes.check_same(answer(cluster))


def test_workers_that_flap_faster_than_any_wait(nodes: Any, answer: Any) -> None:
    """The answer, or an error by name: it ends."""
    cluster = nodes.cluster(worker_wait=3.0)
    flapping = Supervisor(nodes.workers, flap_s=0.3)
    try:
        seen = answer(cluster)
    finally:
        flapping.close()
    assert seen.tokens == nodes.expected[: len(seen.tokens)]
    assert seen.error is None or type(seen.error).__name__ == "RequestFailedError"


def test_a_worker_that_never_answers_is_taken_back_later_each_time(nodes: Any, answer: Any) -> None:
    cluster = nodes.cluster()
    cluster.main.engine.peers.owed.answer_s = 2.0
    nodes.later(partial(nodes.workers[1].process.join, 10))
    nodes.later(nodes.workers[1].kill)  # it sleeps for an hour
    nodes.workers[1].set("compute", "never answer")
    began = time.monotonic()
    for _ in range(3):
        nodes.check_same(answer(cluster))
    assert cluster.lost.count("worker 1") <= 3
    assert time.monotonic() - began < 3 * 2.0 + 10.0

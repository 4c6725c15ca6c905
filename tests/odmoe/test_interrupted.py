"""Many prompts, interrupted while their answers wait for a token that does not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import pytest

from main_node.node import Step
from odmoe.generate import Job, _in_order
from odmoe.settings import Settings
from scheduler.errors import RequestCancelledError

WAIT_S = 20.0


class Waiting(Iterator[Step]):
    """An answer that comes to an end only when it is cancelled."""

    def __init__(self) -> None:
        self.asked, self.cancelled = threading.Event(), threading.Event()

    def __next__(self) -> Step:
        self.asked.set()
        if self.cancelled.wait(WAIT_S):
            raise RequestCancelledError("request 1 was cancelled")
        raise TimeoutError("nobody cancelled it")

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        pass


class Cluster:
    def __init__(self) -> None:
        self.answers: list[Waiting] = []

    def generate(self, prompt: list[int], **how: Any) -> Waiting:
        self.answers.append(Waiting())
        return self.answers[-1]


def test_answers_under_way_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third waits for a thread, and is never begun."""
    cluster = Cluster()
    job = Job(Settings(model="m"), None, cluster, "float32")  # type: ignore[arg-type]

    def interrupt(future: Any) -> None:
        until = time.monotonic() + WAIT_S
        while len(job.under_way) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert all(one.asked.wait(WAIT_S) for one in cluster.answers)
        raise KeyboardInterrupt

    monkeypatch.setattr(futures.Future, "result", interrupt)
    with futures.ThreadPoolExecutor(2) as pool, pytest.raises(KeyboardInterrupt):
        next(_in_order(job, [[1], [2], [3]], pool))
    assert [one.cancelled.is_set() for one in cluster.answers] == [True, True]
    assert job.under_way == set()

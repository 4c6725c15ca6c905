"""Figures of several answers, from the times of their tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.lib.simultaneous import answered_together
from scripts.papers import sweep_requests

REPORT_S = 0.3
"""How long the fake cluster takes to make a report."""


def test_all_tokens_count_and_waits_are_by_request() -> None:
    found = sweep_requests.figures([[1.0, 2.0, 4.0], [2.0, 3.0, 5.0]])
    assert found["tokens_per_s"] == pytest.approx(4 / (5.0 - 1.0))
    assert (found["gap_s"], found["worst_gap_s"], found["ttft_s"]) == (1.5, 2.0, 1.5)


class Cluster:
    """Answers only once all prompts have been asked. The report comes late."""

    def __init__(self, prompts: int) -> None:
        self._asked = threading.Barrier(prompts)

    def generate(self, prompt: list[int], tokens: int, ignore_eos: bool) -> Iterator[Any]:
        assert ignore_eos
        return self._steps(prompt, tokens)

    def _steps(self, prompt: list[int], tokens: int) -> Iterator[Any]:
        self._asked.wait(10)
        for _ in range(tokens - 1):
            yield SimpleNamespace(token_id=1, report=None)
        yield SimpleNamespace(token_id=1, report=None)
        time.sleep(REPORT_S)
        yield SimpleNamespace(token_id=None, report=SimpleNamespace())


def test_prompts_are_asked_at_once() -> None:
    """Of each token when it came; the report comes later, and counts for nothing."""
    found = answered_together(Cluster(3), [[1], [2], [3]], 4)
    assert [len(times) for times in found] == [4, 4, 4]
    assert all(times == sorted(times) and times[-1] - times[0] < REPORT_S for times in found)

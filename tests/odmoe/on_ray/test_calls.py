"""Answers that a client reads from a main node in another process, without Ray."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from main_node.answer import Step, collect
from odmoe.on_ray import calls
from odmoe.on_ray.calls import HeldAnswers, RayAnswer
from scheduler.errors import RequestFailedError

WAIT_S = 5.0
STEPS = [Step(1), Step(2, finish="length"), Step(None, "the report")]  # type: ignore[arg-type]


class Method:
    """A remote method."""

    def __init__(self, called: Any) -> None:
        self.remote = called

    def options(self, **given: Any) -> Method:
        return self


class Main:
    """In the place of the main node's actor."""

    def __init__(self, *steps: Step | Exception) -> None:
        self.cancelled: list[str] = []
        self.generate = Method(lambda key, request: iter(steps))
        self.cancel = Method(self.cancelled.append)


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(step: Any, *rest: Any) -> Any:
        if isinstance(step, Exception):
            raise step
        return step

    ray = SimpleNamespace(is_initialized=lambda: True, wait=lambda pending, timeout: (pending, []))
    monkeypatch.setattr(calls, "ray", ray)
    monkeypatch.setattr(calls, "get", get)


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_tokens_and_report() -> None:
    held, main = HeldAnswers(), Main(*STEPS)
    answer = RayAnswer(main, "key", {}, held)
    assert held.keys() == []
    assert next(answer) == STEPS[0]
    assert held.keys() == ["key"]
    assert collect(answer) == ([2], "the report")
    assert list(answer) == []
    assert (held.keys(), main.cancelled) == ([], [])


@pytest.mark.parametrize("taken", [1, 2])
def test_a_dropped_answer_is_found_without_a_collection(taken: int, uncollected: None) -> None:
    held, main = HeldAnswers(), Main(*STEPS)
    answer = RayAnswer(main, "key", {}, held)
    for _ in range(taken):
        next(answer)
    del answer
    assert held.dropped(WAIT_S) == "key"
    assert (held.keys(), main.cancelled) == ([], []), "a finalizer makes no calls"


@pytest.mark.parametrize("taken", [0, 3])
def test_an_answer_that_has_not_begun_or_has_ended_is_not_cancelled(taken: int, uncollected: None) -> None:
    held = HeldAnswers()
    answer = RayAnswer(Main(*STEPS), "key", {}, held)
    for _ in range(taken):
        next(answer)
    del answer
    assert held.dropped(0.05) is None


def test_the_end_of_a_with_block_cancels_it_once() -> None:
    held, main = HeldAnswers(), Main(*STEPS)
    with RayAnswer(main, "key", {}, held) as answer:
        next(answer)
    answer.close()
    assert (held.keys(), main.cancelled) == ([], ["key"])
    assert list(answer) == []


def test_an_error_ends_it() -> None:
    held = HeldAnswers()
    answer = RayAnswer(Main(STEPS[0], RequestFailedError("no worker")), "key", {}, held)
    next(answer)
    with pytest.raises(RequestFailedError):
        next(answer)
    assert held.keys() == []
    assert list(answer) == []

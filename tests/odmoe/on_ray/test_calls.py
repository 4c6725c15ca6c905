"""Answers that a client reads from a main node in another process, without Ray."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from main_node.answer import Step, collect
from odmoe.on_ray import calls
from odmoe.on_ray.calls import HeldAnswers, RayAnswer, cause_of_death
from scheduler.errors import LaunchError, RequestCancelledError, RequestFailedError

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


@pytest.mark.slow
@pytest.mark.parametrize("taken", [1, 2])
def test_a_dropped_answer_is_found_without_a_collection(taken: int, uncollected: None) -> None:
    held, main = HeldAnswers(), Main(*STEPS)
    answer = RayAnswer(main, "key", {}, held)
    for _ in range(taken):
        next(answer)
    del answer
    assert held.next_dropped(WAIT_S) == "key"
    assert (held.keys(), main.cancelled) == ([], []), "a finalizer makes no calls"


@pytest.mark.slow
@pytest.mark.parametrize("taken", [0, 3])
def test_an_answer_that_has_not_begun_or_has_ended_is_not_cancelled(taken: int, uncollected: None) -> None:
    held = HeldAnswers()
    answer = RayAnswer(Main(*STEPS), "key", {}, held)
    for _ in range(taken):
        next(answer)
    del answer
    assert held.next_dropped(0.05) is None


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


# --- a call that may be given up -------------------------------------------------------------------------------------


class Pending:
    """A call's answer. `looks`: what happens at each look whether it is there; it is not, but after the last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: Any) -> None:
        self._looks = iter(looks)
        self.waited: list[float] = []
        monkeypatch.setattr(calls, "ray", SimpleNamespace(wait=self._wait))

    def _wait(self, pending: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        self.waited.append(timeout)
        look = next(self._looks, None)
        if look is None:
            return pending, []
        look()
        return [], pending


def test_a_call_that_is_wanted_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = Pending(monkeypatch, lambda: None, lambda: None)
    assert calls.get_unless(threading.Event(), pending, 600, "the main node") is pending
    assert pending.waited == [calls.LOOK_S] * 3


def test_a_call_that_nobody_wants_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next look, whatever its deadline."""
    given_up = threading.Event()
    pending = Pending(monkeypatch, lambda: None, given_up.set, lambda: pytest.fail("it is waited for still"))
    with pytest.raises(RequestCancelledError, match="given up while the main node was waited for"):
        calls.get_unless(given_up, pending, 600, "the main node")


def test_a_call_has_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(calls.time, "monotonic", lambda: next(now))
    pending = Pending(monkeypatch, *[lambda: None] * 100)
    with pytest.raises(LaunchError, match="the main node was not ready within 3 s"):
        calls.get_unless(threading.Event(), pending, 3, "the main node")
    assert len(pending.waited) == 3


@pytest.mark.parametrize(
    ("detail", "cause"),
    [
        (
            "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code "
            "2. End of file. Some common causes include: (1) the process was killed by the OOM killer",
            "its process was killed or has crashed; the kernel's log (dmesg) there says if memory ran out",
        ),
        (
            "Worker exit type: INTENDED_USER_EXIT Worker exit detail: Worker exits by an user request. exit code 0",
            "Worker exits by an user request. exit code 0",
        ),
        ("", "The actor died unexpectedly before finishing this task."),
    ],
)
def test_a_death_has_its_cause(detail: str, cause: str) -> None:
    text = f"The actor died unexpectedly before finishing this task.\n\tclass_name: Main\n\tpid: 7\n{detail}"
    assert cause_of_death(text) == cause

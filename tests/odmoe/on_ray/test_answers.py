"""Answers that are held, cancelled and given up. No Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from odmoe.on_ray.answers import LOOKS, Answers
from scheduler.errors import RequestCancelledError


class Reply:
    """An answer that goes on until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.closed = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(1000):
            if self.cancelled.is_set():
                raise RequestCancelledError("request 1 was cancelled")
            yield number

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        self.closed += 1


def steps(answers: Answers, key: str, reply: Reply) -> Iterator[int]:
    """As the main node's process streams them."""
    with answers.under_way(key, reply):
        yield from reply


def test_one_that_is_held_goes_on_for_ever() -> None:
    answers, reply = Answers(), Reply()
    running = steps(answers, "a", reply)
    for number in range(10 * LOOKS):
        assert next(running) == number
        answers.hold(["a", "another, which is over"])
        answers.cancel_unwanted()
    assert not reply.cancelled.is_set()


def test_one_that_nobody_holds_is_given_up_and_says_so() -> None:
    answers, wanted, unwanted = Answers(), Reply(), Reply()
    kept, lost = steps(answers, "kept", wanted), steps(answers, "lost", unwanted)
    next(kept), next(lost)
    for _ in range(LOOKS):
        answers.hold(["kept"])
        answers.cancel_unwanted()
    assert not unwanted.cancelled.is_set()
    answers.hold(["kept"])
    answers.cancel_unwanted()
    assert unwanted.cancelled.is_set()
    assert not wanted.cancelled.is_set()
    with pytest.raises(RequestCancelledError, match="its client has been silent for 30 s; send the request again"):
        next(lost)
    assert (unwanted.closed, wanted.closed) == (1, 0)
    assert next(kept) == 1


def test_cancelled_under_way_before_and_after() -> None:
    answers, reply = Answers(), Reply()
    running = steps(answers, "a", reply)
    next(running)
    answers.cancel("a")
    with pytest.raises(RequestCancelledError, match="request 1 was cancelled"):
        next(running)
    early = Reply()
    answers.cancel("b")
    with pytest.raises(RequestCancelledError):
        next(steps(answers, "b", early))
    assert early.closed == 1
    next(steps(answers, "b", Reply()))  # the word was for one answer


def test_nothing_is_kept_of_answers_that_are_over() -> None:
    """The main node's process lasts as long as the cluster."""
    answers = Answers()
    for number in range(100):
        running = steps(answers, f"{number}", Reply())
        next(running)
        running.close()
        answers.cancel(f"{number}")  # too late, as after an answer that has failed
    for _ in range(100 * LOOKS):
        answers.cancel_unwanted()
    kept = [value for value in vars(answers).values() if isinstance(value, dict | set | list)]
    assert kept
    assert not any(kept)

"""Calls that are suspended and resumed."""

from __future__ import annotations

import threading

import pytest
import torch

from checkpoint.coroutine import Coroutine, in_coroutine, suspend


def test_two_calls_take_turns_on_one_thread() -> None:
    seen: list[tuple[str, int, int]] = []

    def count(name: str) -> str:
        for number in range(3):
            seen.append((name, number, threading.get_ident()))
            assert suspend(number) == number * 10
        return name

    calls = [Coroutine(lambda name=name: count(name)) for name in "ab"]
    assert [call.resume() for call in calls] == [0, 0]
    assert [call.resume(0) for call in calls] == [1, 1]
    assert [call.resume(10) for call in calls] == [2, 2]
    assert not calls[0].ended
    assert [call.resume(20) for call in calls] == [None, None]
    assert [(call.ended, call.result) for call in calls] == [(True, "a"), (True, "b")]
    assert [(name, number) for name, number, _ in seen] == [(name, n) for n in range(3) for name in "ab"]
    assert {thread for _, _, thread in seen} == {threading.get_ident()}


def test_an_error_leaves_through_resume_and_ends_only_its_own_call() -> None:
    def fail() -> None:
        suspend("here")
        raise ValueError("mine")

    bad, good = Coroutine(fail), Coroutine(lambda: suspend("there"))
    bad.resume()
    good.resume()
    with pytest.raises(ValueError, match="mine"):
        bad.resume()
    assert bad.ended
    good.resume(5)
    assert good.result == 5


def test_an_error_can_be_thrown_into_a_suspended_call() -> None:
    def tolerate() -> str:
        try:
            suspend(1)
        except KeyError:
            return "caught"
        return "not thrown"

    call = Coroutine(tolerate)
    call.resume()
    call.throw(KeyError())
    assert call.ended
    assert call.result == "caught"


def test_code_knows_whether_it_can_suspend() -> None:
    call = Coroutine(in_coroutine)
    call.resume()
    assert (call.result, in_coroutine()) == (True, False)


def test_a_module_is_suspended_within_a_hook_and_its_result_is_that_of_a_plain_call() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    rows = torch.randn(3, 1, 4)
    with torch.inference_mode():
        plain = [model(row) for row in rows]
        hook = model[0].register_forward_hook(lambda *_: suspend("between") and None)
        calls = [Coroutine(lambda row=row: model(row)) for row in rows]
        for call in calls:
            assert call.resume() == "between"
        for call in reversed(calls):
            call.resume()
        hook.remove()
    assert all(torch.equal(call.result, one) for call, one in zip(calls, plain, strict=True))

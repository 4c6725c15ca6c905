"""Whatever a pass of the shadow raises, and wherever: it is reported, nothing of it is left, the shadow serves on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from scheduler.errors import ProtocolError
from shadow_node.followed import Followed
from support.cases import slow_except
from support.shadows.shadow_client import WAIT_S, MainAnswer, ShadowClient
from wire.messages import Failed

pytestmark = pytest.mark.timeout(90)

RAISED: dict[str, Callable[[], BaseException]] = {
    "MemoryError": MemoryError,
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "RuntimeError": RuntimeError,
    "KeyError": lambda: KeyError("layers.3"),
    "TypeError": TypeError,
    "ZeroDivisionError": ZeroDivisionError,
    "AssertionError": AssertionError,
    "RecursionError": RecursionError,
    "ProtocolError": lambda: ProtocolError("wrong"),
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
}
ONE: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "the pass": lambda session: (session._shadow.model, "forward"),
    "its begin": lambda session: (Followed, "start"),
    "its end": lambda session: (Followed, "on_pass_ended"),
    "the pace": lambda session: (session._shadow.pace, "layer"),
    "the prediction": lambda session: (session, "send"),
    "the memory figure": lambda session: (session, "on_pass_ended"),
    "an alignment": lambda session: (Followed, "receive"),
}
TWO: dict[str, Callable[[Any], tuple[Any, str]]] = {
    **{name: ONE[name] for name in ("its begin", "its end", "the pace", "the prediction", "the memory figure")},
    "a pass of several": lambda session: (session._shadow.model, "lock_step"),
    "their experts": lambda session: (session._shadow.model, "experts_of"),
}


def fail_once(patch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException) -> None:
    inner = getattr(owner, name)
    left = [error]

    def failing(*args: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return inner(*args, **named)

    patch.setattr(owner, name, failing)


def serves(shadow: Any, answers: list[MainAnswer]) -> None:
    """As to a main node that has lost it and connects again."""
    main = ShadowClient(shadow)
    main.hello()
    for number in (1, 2):
        main.open(number, answers[number - 1])
        main.align(number, 0)
    assert main.passes(1) == main.passes(2) == [0]
    assert main.of(Failed) == []


@pytest.mark.parametrize("error", slow_except([*RAISED][:1], RAISED))
@pytest.mark.parametrize(
    ("requests", "where"), [(1, name) for name in ONE] + [(2, name) for name in TWO], ids=lambda one: str(one)
)
def test_a_pass_that_fails_is_reported_and_leaves_nothing(
    main_of: Any,
    answers: list[MainAnswer],
    monkeypatch: pytest.MonkeyPatch,
    requests: int,
    where: str,
    error: str,
) -> None:
    main = main_of()
    session = main.shadow.sessions._served
    for number in range(1, requests + 1):
        main.open(number, answers[number - 1])
    main.settle()
    fail_once(monkeypatch, *(ONE if requests == 1 else TWO)[where](session), RAISED[error]())
    for number in range(1, requests + 1):
        main.align(number, 0)
    main.wait(lambda: any(isinstance(m, Failed) for m in main.got), "a report")
    main.settle()
    failure = main.of(Failed)[0]
    assert failure.error == error
    assert failure.message.startswith("shadow: ")
    assert not session._passes._running, "no pass is in flight"
    assert main.shadow.model.on_routed is None
    assert session._thread._thread.is_alive()
    monkeypatch.undo()
    serves(main.shadow, answers)


def test_a_stream_that_ends_within_a_step_leaves_no_pass(main_of: Any, answers: list[MainAnswer]) -> None:
    """A suspended pass would keep its caches: what is suspended can be ended by its own thread alone."""
    main = main_of()
    session = main.shadow.sessions._served
    for number in (1, 2):
        main.open(number, answers[number - 1])
    main.settle()
    main.on_prediction = lambda message: session.on_close(None) if message.layer == 3 else None
    for number in (1, 2):
        main.align(number, 0)
    session._thread._thread.join(WAIT_S)
    assert not session._passes._running

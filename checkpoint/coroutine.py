"""Calls that are suspended in the middle and resumed later, on one thread.

The forward passes of several requests run in lock-step this way: each stops where it has to wait for the others. With
threads in their place, every stop would be a hand-over, and torch would have a pool of threads for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from greenlet import getcurrent, greenlet

T = TypeVar("T")


class Coroutine(Generic[T]):
    """A call of `function`, which may call `suspend` at any depth. All of it runs on the thread that first resumes it.

    Context that torch keeps for each thread (inference mode) is that of this thread, and not of the coroutine: enter it
    around all coroutines of the thread, never within one.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self.ended = False
        """The call has returned or raised."""
        self._function = function
        self._result: T | None = None
        self._greenlet = _Greenlet(self._run)

    def _run(self, _: object) -> object:
        try:
            self._result = self._function()
        finally:
            self.ended = True
        return None

    def resume(self, value: object = None) -> Any:
        """Run until the call suspends itself or returns: what `suspend` was given, or None at the end. In the call,
        `suspend` returns `value`. Raises what the call raises."""
        return self._greenlet.switch(value)

    def throw(self, error: BaseException) -> Any:
        """As `resume`, but `suspend` raises `error` in the call."""
        return self._greenlet.throw(error)

    @property
    def result(self) -> T:
        """What the call returned, once it has ended without an error."""
        return self._result  # type: ignore[return-value]


class _Greenlet(greenlet):
    """Told from those of other libraries by its class."""


def in_coroutine() -> bool:
    """Whether the calling code runs in a coroutine, so that it can `suspend`."""
    return isinstance(getcurrent(), _Greenlet)


def suspend(what: object) -> Any:
    """Stop the coroutine that this is called in: `resume` returns `what`, and this returns what it is resumed with.

    Raises RuntimeError outside of a coroutine.
    """
    caller = getcurrent().parent
    if caller is None:
        raise RuntimeError("only code that runs in a Coroutine can be suspended")
    return caller.switch(what)

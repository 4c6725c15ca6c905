"""Calls to actors, with a deadline and with errors of our own tree."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from main_node.answer import Step
from scheduler.closing import Closing
from scheduler.errors import ClusterError, LaunchError, LinkError, MainNodeLostError, ODMoEError, RequestCancelledError

STEP_S = 600.0
"""The most time between two tokens. The main node's own waits are shorter, unless --launch-timeout is longer; this
detects a dead one."""
FIRST_S = 3600.0
"""The most time to the first token: a request may wait for its place among those that are answered at once."""
CONTROL_S = 30.0
"""The most time for a call about the cluster itself."""
LOOK_S = 0.5
"""Between two looks whether a call is still wanted."""
QUICK: dict[str, Any] = {"concurrency_group": "control"}
START: dict[str, Any] = {"concurrency_group": "start"}
"""Options of a call that must not queue behind open answers: it has threads of its own in the main node."""
GROUPS = {"control": 4, "start": 2}
"""Threads of each group: a start, which may take minutes, does not block calls about the state."""


def get(pending: Any, deadline_s: float, who: str, if_dead: str = "") -> Any:
    """`ray.get` with a deadline. Raises errors of our tree unchanged, and LinkError if the actor's process is gone.

    `if_dead` is the advice for an actor that Ray does not restart.
    """
    try:
        return ray.get(pending, timeout=deadline_s)
    except GetTimeoutError as error:
        raise _late(who, deadline_s) from error
    except RayTaskError as error:
        if isinstance(error.cause, ODMoEError):
            raise error.cause from error
        raise ClusterError(f"{who} failed: {error.cause!r}") from error
    except ActorUnavailableError as error:
        raise LinkError(f"{who} is not there just now: Ray starts it again when it can") from error
    except RayActorError as error:
        raise LinkError(f"{who} died: {cause_of_death(str(error))}{if_dead}") from error
    except RayError as error:
        raise ClusterError(f"{who} cannot be reached: {str(error).splitlines()[0]}") from error


def cause_of_death(text: str) -> str:
    """Why an actor died, in Ray's words if it knows more than that the process is gone."""
    detail = re.search(r"Worker exit detail: (.*?)\.?(?: There are some| Some common causes|$)", text, re.MULTILINE)
    if detail and "connection error code" in detail[1]:
        return "its process was killed or has crashed; the kernel's log (dmesg) there says if memory ran out"
    return detail[1] if detail else text.splitlines()[0]


def get_unless(given_up: threading.Event, pending: Any, deadline_s: float, who: str) -> Any:
    """As `get`. Raises RequestCancelledError soon after `given_up` is set."""
    end = time.monotonic() + deadline_s
    while not ray.wait([pending], timeout=LOOK_S)[0]:
        if given_up.is_set():
            raise RequestCancelledError(f"the answer was given up while {who} was waited for")
        if time.monotonic() >= end:
            raise _late(who, deadline_s)
    return get(pending, CONTROL_S, who)


def _late(who: str, deadline_s: float) -> LaunchError:
    return LaunchError(f"{who} was not ready within {deadline_s:g} s; ray status shows what is missing")


class HeldAnswers:
    """The answers of this process that are being computed, by key. Thread-safe."""

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._dropped: queue.SimpleQueue[str] = queue.SimpleQueue()

    def add(self, key: str) -> None:
        self._keys.add(key)

    def discard(self, key: str) -> None:
        self._keys.discard(key)

    def watch(self, answer: RayAnswer) -> None:
        """Have `dropped` give its key when nothing refers to it any more. Its finalizer does no more than that: it may
        run in any thread, at any moment, with any lock held."""
        weakref.finalize(answer, self._dropped.put, answer.key).atexit = False

    def keys(self) -> list[str]:
        return list(self._keys.copy())

    def next_dropped(self, within_s: float) -> str | None:
        """The key of an answer that was dropped before its end. None: there was none within that time."""
        end = time.monotonic() + within_s
        while (left_s := end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                key = self._dropped.get(timeout=left_s)
                if key in self._keys:
                    self._keys.discard(key)
                    return key
        return None


class RayAnswer(Closing, Iterator[Step]):
    """One answer, streamed from the main node's process. The request is sent with the first `next`."""

    def __init__(
        self, main: Any, key: str, request: dict[str, Any], held: HeldAnswers, worker_wait_s: float = 0.0
    ) -> None:
        """`held`: this answer is among them from the first `next` to its end. `worker_wait_s`: how long the main node
        waits for workers, beyond `STEP_S`."""
        self.key = key
        self._step_s = STEP_S + worker_wait_s
        self._main, self._request, self._held = main, request, held
        self._pending: Any = None
        self._over = False
        held.watch(self)

    def __next__(self) -> Step:
        """Raises RequestCancelledError after `cancel`, RequestFailedError, ClusterError."""
        if self._over:
            raise StopIteration
        try:
            step = self._following()
        except BaseException:
            self.close()
            raise
        if step.report is not None:
            self._end()
        return step

    def _following(self) -> Step:
        wait_s = self._step_s
        if self._pending is None:
            self._pending = self._main.generate.options(num_returns="streaming").remote(self.key, self._request)
            self._held.add(self.key)
            wait_s = FIRST_S
        if not ray.wait([self._pending], timeout=wait_s)[0]:
            raise ClusterError(f"the main node has sent nothing for {wait_s:g} s")
        following = next(self._pending, None)
        if following is None:
            raise ClusterError("the main node ended the answer early; see its log")
        try:
            step: Step = get(following, STEP_S, "the main node", "; the cluster must be started again")
        except LinkError as error:
            if isinstance(error.__cause__, RayActorError):
                raise MainNodeLostError(str(error)) from error.__cause__
            raise
        return step

    def _end(self) -> None:
        self._over = True
        self._held.discard(self.key)

    def cancel(self) -> None:
        """From any thread, at any time."""
        if ray.is_initialized():  # else its cluster was closed, and the answer with it
            with contextlib.suppress(RayError):
                self._main.cancel.options(**QUICK).remote(self.key)

    def close(self) -> None:
        """From the thread that iterates."""
        if self._pending is not None and not self._over:
            self.cancel()
        self._end()

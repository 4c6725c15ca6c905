"""Calls to actors, with a deadline and with errors of our own tree."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from main_node.answer import Step
from scheduler.errors import ClusterError, LaunchError, LinkError, ODMoEError

STEP_S = 600.0
"""The most time between two tokens. The main node's own waits are shorter, unless --launch-timeout is longer; this
detects a dead one."""
FIRST_S = 3600.0
"""The most time to the first token: a request may wait for its place among those that are answered at once."""
CONTROL_S = 30.0
"""The most time for a call about the cluster itself."""
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
        raise LaunchError(f"{who} was not ready within {deadline_s:g} s; ray status shows what is missing") from error
    except RayTaskError as error:
        if isinstance(error.cause, ODMoEError):
            raise error.cause from error
        raise ClusterError(f"{who} failed: {error.cause!r}") from error
    except ActorUnavailableError as error:
        raise LinkError(f"{who} is not there just now: Ray starts it again when it can") from error
    except RayActorError as error:
        raise LinkError(f"{who} died: {str(error).splitlines()[0]}{if_dead}") from error
    except RayError as error:
        raise ClusterError(f"{who} cannot be reached: {str(error).splitlines()[0]}") from error


class RayAnswer(Iterator[Step]):
    """One answer, streamed from the main node's process. The request is sent with the first `next`."""

    def __init__(self, main: Any, key: str, request: dict[str, Any], open_ones: set[RayAnswer]) -> None:
        """`open_ones` is the set of open answers; this one is in it until it ends."""
        self.key = key
        self._open = open_ones
        self._main = main
        self._steps = self._run(request)

    def __next__(self) -> Step:
        """Raises RequestCancelledError after `cancel`, RequestFailedError, ClusterError."""
        return next(self._steps)

    def cancel(self) -> None:
        """From any thread, at any time."""
        with contextlib.suppress(RayError):
            self._main.cancel.options(**QUICK).remote(self.key)

    def close(self) -> None:
        """From the thread that iterates."""
        self._steps.close()

    def _run(self, request: dict[str, Any]) -> Generator[Step, None, None]:
        pending = self._main.generate.options(num_returns="streaming").remote(self.key, request)
        self._open.add(self)
        done, wait_s = False, FIRST_S
        try:
            while not done:
                ready, _ = ray.wait([pending], timeout=wait_s)
                if not ready:
                    raise ClusterError(f"the main node has sent nothing for {wait_s:g} s")
                wait_s = STEP_S
                following = next(pending, None)
                if following is None:
                    raise ClusterError("the main node ended the answer early; see its log")
                step: Step = get(following, STEP_S, "the main node", "; the cluster must be started again")
                done = step.report is not None
                yield step
        finally:
            self._open.discard(self)
            if not done:
                self.cancel()

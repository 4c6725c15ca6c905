"""An answer that outlives its main node: the request is sent again, and no token is shown twice.

The answer is computed anew from its first token, not continued by a prefill of the tokens so far: a prefill multiplies
their rows together, which may change the last bit of a product and with it a later token.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from odmoe.terminal import count_text
from scheduler.errors import AnswerChangedError, LinkError, MainNodeLostError, RequestError

if TYPE_CHECKING:
    from main_node.answer import Step
    from main_node.sampling import GenerateOptions, Sampling
    from odmoe.clusters.base import Answering, Cluster

AGAIN_S = 0.5
"""Between two looks for a main node that starts again."""


@dataclass(frozen=True, slots=True)
class Retrying:
    """What becomes of a request whose main node is lost."""

    times: int = 0
    """How often it is sent again."""
    wait_s: float = 0.0
    """How long to wait for a main node each time."""
    notify: Callable[[str], None] = lambda text: None
    """Gets a line about each retry."""


class RetriedAnswer:
    """The steps of one answer, each token once, whatever number of main nodes computed it."""

    def __init__(
        self,
        cluster: Cluster,
        retrying: Retrying,
        given_up: threading.Event,
        under_way: set[Answering],
    ) -> None:
        """`given_up`: set when nobody wants the answer any more. `under_way`: has the answer that is being read."""
        self._cluster = cluster
        self._retries, self._wait_s, self._notify = retrying.times, retrying.wait_s, retrying.notify
        self._given_up = given_up
        self._under_way = under_way
        self._tokens: list[int] = []

    def steps(self, prompt: list[int], max_new_tokens: int, how: GenerateOptions) -> Generator[Step]:
        """As `Cluster.generate`. Raises what iterating over its answer raises, MainNodeLostError only when no retry is
        left, and AnswerChangedError for another token than before."""
        if self._retries and "sampling" in how:
            how["sampling"] = _with_seed(how["sampling"])
        for retry in range(self._retries + 1):
            try:
                yield from self._once(prompt, max_new_tokens, how)
                return
            except MainNodeLostError as error:
                if retry == self._retries:
                    raise
                self._notify(
                    f"main node lost after {count_text(len(self._tokens), 'token')}; "
                    f"retry {retry + 1} of {self._retries}"
                )
                self._wait_until_back(error)

    def _once(self, prompt: list[int], max_new_tokens: int, how: GenerateOptions) -> Iterator[Step]:
        position = 0
        with closing(self._cluster.generate(prompt, max_new_tokens=max_new_tokens, **how)) as steps:
            self._under_way.add(steps)
            if self._given_up.is_set():  # before there was anything to cancel
                steps.cancel()
            try:
                for step in steps:
                    if step.token_id is None:
                        yield step
                    elif position >= len(self._tokens):
                        self._tokens.append(step.token_id)
                        yield step
                    elif step.token_id != self._tokens[position]:
                        raise AnswerChangedError(
                            f"token {position + 1} of the answer is {step.token_id} now, and was "
                            f"{self._tokens[position]} before the main node was lost; what is shown may be wrong: send "
                            "the request again"
                        )
                    position += 1
            finally:
                self._under_way.discard(steps)

    def _wait_until_back(self, lost: MainNodeLostError) -> None:
        """Raises MainNodeLostError if no main node serves the same model in time, RequestError if given up."""
        end = time.monotonic() + self._wait_s
        while True:
            try:
                self._cluster.rejoin(max(1.0, end - time.monotonic()), self._given_up)
                return
            except LinkError as error:
                if time.monotonic() >= end:
                    raise MainNodeLostError(
                        f"{lost}; it was not back after {self._wait_s:g} s (--launch-timeout): {error}"
                    ) from error
            if self._given_up.wait(AGAIN_S):
                raise RequestError("interrupted")


def _with_seed(sampling: Sampling) -> Sampling:
    """With a seed where tokens are drawn: every main node would choose another one."""
    return replace(sampling, seed=secrets.randbits(32)) if sampling.is_random and sampling.seed is None else sampling

"""Clients that ask again and again while faults come: prompts of mixed lengths, some that leave, some that ask wrongly.

Each answer is greedy, and its tokens are known from before the faults.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from scheduler.errors import ODMoEError

LEAVES, WRONG = 0.1, 0.05
"""Shares of requests whose client leaves, and of those that no service may accept."""
PAUSE_S = 0.2
"""After an error: the cluster may be away."""

Opened = AbstractContextManager[Iterator[int]]
Ask = Callable[[Sequence[int], int], Opened]
"""Prompt and number of tokens -> the tokens of the answer, as they come. Raises ODMoEError."""


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    expected: list[int]
    """Of the greedy answer, the most that is ever asked for."""


@dataclass(slots=True)
class Outcome:
    """What a client saw of one request. Times are of the monotonic clock."""

    prompt: Prompt | None
    """None: a wrong request."""
    count: int
    leaves_after: int | None = None
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When it was sent, when each token came, and when it ended, in this order."""
    error: str | None = None
    """Class and message of a typed error."""
    defect: str | None = None
    """What no client may see: an exception without a type of ours."""
    left: bool = False
    answer: Any = None
    """While it is open."""

    @property
    def is_changed(self) -> bool:
        """Whether a token is another one than without faults, or one is missing."""
        if self.prompt is None:
            return bool(self.tokens)
        whole = self.error is None and self.defect is None and not self.left
        wanted = self.prompt.expected[: self.count if whole else len(self.tokens)]
        return self.tokens != wanted

    def stalled_s(self, from_first: bool) -> float:
        """Seconds of the longest time without progress. `from_first`: after the first token."""
        gaps = pairwise(self.times[from_first:])
        return max((later - before for before, later in gaps), default=0.0)

    def longest_pause(self, since: float, until: float) -> float:
        """Seconds between two tokens, or between the last and the end, of those that overlap the time given. The first
        token, which waits for a place and the prompt, does not count."""
        gaps = pairwise(self.times[1:])
        return max((later - before for before, later in gaps if later > since and before < until), default=0.0)


class Load:
    """`clients` threads that ask until `close`. What they saw is in `outcomes`."""

    def __init__(self, ask: Ask, prompts: Sequence[Prompt], clients: int, seed: int, wrong: Sequence[int]) -> None:
        """`wrong`: a prompt that must be refused."""
        self.outcomes: list[Outcome] = []
        self._ask, self._prompts, self._wrong = ask, prompts, wrong
        self._over = threading.Event()
        self._open: dict[int, Outcome] = {}
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(number, random.Random(seed * 1000 + number)), daemon=True)
            for number in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def under_way(self) -> list[Outcome]:
        with self._lock:
            return list(self._open.values())

    def late(self, bound_s: float, from_first: bool) -> int:
        """How many requests that are open have no progress for longer than a bound. `from_first`: after the first
        token."""
        now = time.monotonic()
        return sum(now - one.times[-1] > bound_s for one in self.under_way() if len(one.times) > 1 or not from_first)

    def leave(self) -> int:
        """Every client leaves its answer, from another thread, as if its connection ended. A wrong request goes on
        until it is refused. Returns how many left."""
        found = [one for one in self.under_way() if one.prompt is not None]
        for one in found:
            one.left = True
            if one.answer is not None:
                one.answer.cancel()
        return len(found)

    def abandon(self, within_s: float) -> None:
        """No further request, and every client leaves."""
        self._over.set()
        self.leave()
        self.close(within_s)

    def close(self, within_s: float) -> int:
        """No further request. Returns how many were still open after that time."""
        self._over.set()
        end = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return len(self.under_way())

    def _run(self, number: int, rng: random.Random) -> None:
        while not self._over.is_set():
            one = self._drawn(rng)
            one.times.append(time.monotonic())
            with self._lock:
                self._open[number] = one
            ask_once(self._ask, one, self._wrong)
            with self._lock:
                del self._open[number]
                self.outcomes.append(one)
            if one.error or one.defect:
                self._over.wait(PAUSE_S)

    def _drawn(self, rng: random.Random) -> Outcome:
        kind, prompt = rng.random(), rng.choice(self._prompts)
        if kind < WRONG:
            return Outcome(None, 1)
        count = rng.randint(1, len(prompt.expected))
        leaves = rng.randrange(count) if kind < WRONG + LEAVES else None
        return Outcome(prompt, count, leaves)


def ask_once(ask: Ask, one: Outcome, wrong: Sequence[int] = ()) -> None:
    """Ask for one answer, and note what comes."""
    try:
        with ask(one.prompt.ids if one.prompt else wrong, one.count) as answer:
            one.answer = answer
            for token in answer:
                one.tokens.append(token)
                one.times.append(time.monotonic())
                if one.leaves_after is not None and len(one.tokens) > one.leaves_after:
                    one.left = True
                    break
    except ODMoEError as error:
        if not one.left:
            one.error = f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - the referee names it
        one.defect = f"{type(error).__name__}: {error}"
    finally:
        one.answer = None
        one.times.append(time.monotonic())

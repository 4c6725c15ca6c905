"""The service under load: clients that come by a Poisson process, and more at once than it has places for."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import numpy as np

from scripts.service.clients import STUCK, WHOLE, WRONG, Crowd, Question, Seen, arriving, at_once, fill, questions
from scripts.service.server import ServerProcess
from scripts.service.watching import MemoryWatch, held, left

PERCENTILES = (50, 95, 99)
REFUSED = "429 queue_full"
MORE = 16
"""Clients beyond the server's places."""


def percentile(values: Iterable[float], share: float) -> float | None:
    """As numpy's: between two values where none stands at that share. None of no values."""
    found = list(values)
    return float(np.percentile(found, share)) if found else None


def outcomes(seen: Sequence[Seen], right: dict[Question, str]) -> dict[str, Any]:
    """How many clients saw what."""
    kinds = Counter(one.kind(right[one.question]) for one in seen)
    return {
        "requests": len(seen),
        "whole": kinds.pop(WHOLE, 0),
        "wrong": kinds.pop(WRONG, 0),
        "stuck": kinds.pop(STUCK, 0),
        "refused_429": kinds.pop(REFUSED, 0),
        "no_retry_after": sum(one.status == 429 and not one.retry_after for one in seen),
        "others": dict(kinds),
    }


def times(seen: Sequence[Seen], seconds: float) -> dict[str, Any]:
    """Of answers that came whole. `seconds`: from the first request to the last one's end."""
    firsts = [one.times[0] - one.due for one in seen]
    gaps = [b - a for one in seen for a, b in zip(one.times, one.times[1:], strict=False)]
    return {
        "at_once_mean": sum(one.ended - one.due for one in seen) / seconds,
        "tokens_per_s": sum(one.question.tokens for one in seen) / seconds,
        **{f"ttft_p{share}_s": percentile(firsts, share) for share in PERCENTILES},
        **{f"gap_p{share}_s": percentile(gaps, share) for share in PERCENTILES},
        "longest_gap_s": max(gaps, default=None),
    }


class LoadTest:
    """Rows of one server. `right`: the engine's own answers. `parallel`, `queue`: the server's."""

    def __init__(
        self, server: ServerProcess, name: str, right: dict[Question, str], parallel: int, queue: int, seed: int
    ) -> None:
        self._server, self._name, self._right = server, name, right
        self._parallel, self._queue = parallel, queue
        self._draw = random.Random(seed)
        self._questions = questions()

    async def rows(self, shares: Sequence[float], seconds: float, deadline_s: float) -> AsyncIterator[dict[str, Any]]:
        """A row for each rate, and one of a full queue. `shares`: of the rate at which a closed loop of `parallel`
        clients is served."""
        async with Crowd(self._server.url, self._name, deadline_s) as crowd:
            await fill(crowd, self._parallel + self._queue)
            capacity = await self._capacity(crowd)
            for share in shares:
                say(f"{share:g} of {capacity:.2f} requests/s, for {seconds:.0f} s")
                row = await self._row(crowd, share * capacity, seconds)
                yield {"part": "load", "share": share, "rate": share * capacity} | row
            yield await self._full(crowd)

    async def _capacity(self, crowd: Crowd) -> float:
        """Requests a second of a closed loop."""
        asked = [self._draw.choice(self._questions) for _ in range(2 * self._parallel)]
        began = time.monotonic()
        await at_once(self._parallel, lambda number: crowd.ask(asked[number]), len(asked))
        return len(asked) / (time.monotonic() - began)

    async def _row(self, crowd: Crowd, rate: float, seconds: float) -> dict[str, Any]:
        baseline = await held(self._server)
        crowd.most_open = 0
        with MemoryWatch(self._server.resident_bytes) as memory:
            began = time.monotonic()
            seen = await arriving(crowd, self._questions, rate, seconds, self._draw)
            took = time.monotonic() - began
        whole = [one for one in seen if one.kind(self._right[one.question]) == WHOLE]
        return {
            **outcomes(seen, self._right),
            **times(whole, took),
            "at_once_most": crowd.most_open,
            **memory.facts(),
            **left(baseline, await held(self._server, baseline)),
        }

    async def _full(self, crowd: Crowd) -> dict[str, Any]:
        """More clients at once than there are places."""
        clients = self._parallel + self._queue + MORE
        say(f"{clients} clients at once, for {clients - MORE} places")
        baseline = await held(self._server)
        longest = max(self._questions, key=lambda question: question.tokens)
        seen = await at_once(clients, lambda number: crowd.ask(longest), clients)
        found = left(baseline, await held(self._server, baseline))
        return {"part": "full queue", "places": clients - MORE, **outcomes(seen, self._right), **found}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

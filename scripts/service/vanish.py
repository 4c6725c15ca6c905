"""Clients that hang up in the middle of their answers: what stays behind, and when their loads stop."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

from scripts.service.clients import LEFT, LEFT_EARLY, SPEAKERS, WHOLE, Crowd, Question, Seen, at_once, fill
from scripts.service.load import percentile, say
from scripts.service.recorded import Loads, read_record
from scripts.service.server import ServerProcess
from scripts.service.watching import MemoryWatch, held, left

LAST = 40
"""A client hangs up after 1 to so many events with text."""
TOKENS = 100
"""Of the shortest answer. Each client asks for another number of tokens, by which the engine's record knows it."""
LONGEST = 800
"""Of the longest answer: the numbers are used again after so many clients, when those of before are long gone."""
THEN_S = 0.25
"""Longest wait between that event and the end: a client goes at any moment, not only when something has come."""
WARM_UP = 8
"""Clients that hang up before anything is counted: what is begun with the first of them, stays."""
EARLY_SHARE, EARLY_S = 0.2, 1.0
"""So many leave before their first token, at most so long after they have asked."""


class Vanishing:
    """`together`: how many clients at once. `record`: of the server's engine."""

    def __init__(self, server: ServerProcess, name: str, record: Path, together: int, places: int, seed: int) -> None:
        self._server, self._name, self._record = server, name, record
        self._together, self._places = together, places
        self._draw = random.Random(seed)
        self._numbers = itertools.cycle(range(TOKENS, LONGEST))

    async def rows(self, clients: int, alone: int, deadline_s: float) -> AsyncIterator[dict[str, Any]]:
        """`clients` leave in mid-answer among others, then `alone` one after the other."""
        async with Crowd(self._server.url, self._name, deadline_s) as crowd:
            await fill(crowd, self._places)
            await self._crowd(crowd, WARM_UP, WARM_UP)
            say(f"{clients} clients that hang up, {self._together} at once")
            yield await self._row(crowd, "among others", clients, self._together)
            say(f"{alone} clients that hang up, one after the other")
            yield await self._row(crowd, "one by one", alone, 1)

    async def _row(self, crowd: Crowd, how: str, clients: int, together: int) -> dict[str, Any]:
        """Until `clients` have left in mid-answer, or in a whole round nobody has. Whoever is refused, or leaves early,
        comes on top."""
        baseline = await held(self._server)
        before = len(read_record(self._record))
        seen: list[Seen] = []
        with MemoryWatch(self._server.resident_bytes) as memory:
            gone, before_round = 0, -1
            while before_round < gone < clients:
                before_round = gone
                seen += await self._crowd(crowd, clients - gone, together)
                gone = sum(one.kind(None) == LEFT for one in seen)
            after = await held(self._server, baseline)
        record = read_record(self._record)[before:]
        filled = await fill(crowd, self._places, tokens=2)
        kinds = Counter(one.kind(None) for one in seen)
        return {
            "part": "vanish",
            "how": how,
            "clients": clients,
            "mid_answer": kinds.pop(LEFT, 0),
            "early": kinds.pop(LEFT_EARLY, 0),
            "others": dict(kinds),
            "requests_recorded": len(record),
            **left(baseline, after),
            "loads_in_flight": record[-1].in_flight if record else 0,
            "places": self._places,
            "places_filled": sum(one.kind(None) == WHOLE for one in filled),
            **memory.facts(),
            **stops(seen, record),
        }

    async def _crowd(self, crowd: Crowd, clients: int, together: int) -> list[Seen]:
        return await at_once(together, lambda number: self._leaving(crowd), clients)

    async def _leaving(self, crowd: Crowd) -> Seen:
        question = Question(self._draw.choice(SPEAKERS), next(self._numbers))
        if self._draw.random() < EARLY_SHARE:
            return await crowd.ask_and_leave(question, 0, self._draw.uniform(0.0, EARLY_S))
        return await crowd.ask_and_leave(question, self._draw.randint(1, LAST), self._draw.uniform(0.0, THEN_S))


def stops(seen: Sequence[Seen], record: Iterable[Loads]) -> dict[str, Any]:
    """When the loads of clients that left in mid-answer stopped, by the engine's record: seconds from the moment at
    which each hung up to the beginning of its last load, 0 where that was before, and to the moment at which the engine
    had given up all of it."""
    closed_in_turn: dict[int, list[Loads]] = defaultdict(list)
    for one in record:
        closed_in_turn[one.max_new_tokens].append(one)

    def of(client: Seen, when: float) -> Loads | None:
        """The first request of the client's number of tokens that was closed after it had gone."""
        return next((one for one in closed_in_turn[client.question.tokens] if one.closed >= when), None)

    gone = [(one.left, of(one, one.left)) for one in seen if one.left is not None and one.times]
    known = [(when, one) for when, one in gone if one is not None]
    loads = [max(0.0, one.last_load - when) for when, one in known if one.last_load is not None]
    closed = [one.closed - when for when, one in known]
    return {
        "unknown": len(gone) - len(known),
        "loaded_afterwards": sum(wait > 0 for wait in loads),
        **_spread("last_load", loads),
        **_spread("given_up", closed),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {
        **{f"{name}_p{share}_s": percentile(values, share) for share in (50, 99)},
        f"{name}_worst_s": max(values, default=None),
    }

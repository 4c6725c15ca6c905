"""Clients that leave in the middle of their answers: what stays behind, and how long their loads go on."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

from scripts.lib.prompts import gsm8k_prompts
from scripts.service.clients import Crowd, Question, Seen, at_once, warm
from scripts.service.load import PROMPTS, percentile, say, settled
from scripts.service.server import MemoryWatch, ServerProcess

TOKENS = 200
"""Of the answers that nobody reads to the end."""
LAST = 60
"""A client leaves after 0 to so many tokens, or before the first."""
QUIET_S = 0.4
"""Loads have stopped where there was none for so long."""
LOADS = "odmoe_expert_loads_total"


class Vanishing:
    """`clients`: how many come and go. `together`: how many at once."""

    def __init__(self, server: ServerProcess, name: str, clients: int, together: int, seed: int) -> None:
        self._server, self._name = server, name
        self._clients, self._together = clients, together
        self._draw = random.Random(seed)
        self._prompts = gsm8k_prompts(PROMPTS)

    async def rows(self, alone: int) -> list[dict[str, Any]]:
        """`alone`: so many more leave one after the other, to time the end of their loads."""
        async with Crowd(self._server.url, self._name, 600.0) as crowd:
            await warm(crowd, self._together)
            return [await self._crowd(crowd), await self._alone(crowd, alone)]

    async def _crowd(self, crowd: Crowd) -> dict[str, Any]:
        say(f"{self._clients} clients that leave, {self._together} at once")
        threads = self._server.threads()
        with MemoryWatch(self._server) as memory:
            seen = await at_once(self._together, lambda number: self._leaving(crowd), self._clients)
            left = await settled(self._server)
        after = await crowd.ask(Question(self._prompts[0], 4))
        return {
            "part": "vanish",
            "clients": self._clients,
            "saw": dict(Counter("left" if not one.done and not one.error else one.kind(None) for one in seen)),
            "requests_left": left,
            "threads_more": self._server.threads() - threads,
            **memory.facts(),
            "answers_afterwards": after.kind(None) == "whole",
        }

    async def _leaving(self, crowd: Crowd) -> Seen:
        """Leaves after some tokens, or at some moment before the first."""
        question = Question(self._draw.choice(self._prompts), TOKENS)
        if self._draw.random() < 0.3:
            asking = asyncio.create_task(crowd.ask(question))
            await asyncio.sleep(self._draw.uniform(0.0, 0.5))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            return Seen(question, 0.0)
        after = self._draw.randint(1, LAST)
        return await crowd.ask(question, leave=lambda seen: len(seen.times) >= after)

    async def _alone(self, crowd: Crowd, count: int) -> dict[str, Any]:
        say(f"{count} clients that leave one after the other: when do their loads stop")
        waits = []
        for number in range(count):
            after = self._draw.randint(1, LAST)
            await crowd.ask(
                Question(self._prompts[number % PROMPTS], TOKENS), leave=lambda seen, n=after: len(seen.times) >= n
            )
            waits.append(await self._loads_stopped(time.perf_counter()))
        return {
            "part": "loads stop",
            "clients": count,
            "loads_stop_p50_s": percentile(waits, 50),
            "loads_stop_p99_s": percentile(waits, 99),
            "loads_stop_worst_s": max(waits),
        }

    async def _loads_stopped(self, gone: float) -> float:
        """Seconds from `gone` to the first scrape after which no load began: no less than it took."""
        count, changed = -1.0, gone
        while time.perf_counter() - changed < QUIET_S:
            found = (await asyncio.to_thread(self._server.metrics))[LOADS]
            if found != count:
                count, changed = found, time.perf_counter()
        return changed - gone

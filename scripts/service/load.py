"""The service under load: open-loop arrivals, and its cost a token over the engine alone."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from scripts.lib.prompts import gsm8k_prompts
from scripts.service.clients import Crowd, Question, Seen, arriving, at_once, lone_answers, warm
from scripts.service.engine import EngineAlone
from scripts.service.server import MemoryWatch, ServerProcess

LENGTHS = (8, 16, 32)
"""Tokens of answers."""
PROMPTS = 8
SETTLE_S = 30.0
"""Longest wait for the last requests to leave the server."""
TURNS = 5
PERCENTILES = (50, 95, 99)


def questions() -> list[Question]:
    return [Question(prompt, tokens) for prompt in gsm8k_prompts(PROMPTS) for tokens in LENGTHS]


def percentile(values: Iterable[float], share: float) -> float | None:
    """By the nearest rank; None of no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share / 100 * len(ordered)))] if ordered else None


def figures(seen: Sequence[Seen], right: dict[Question, str], seconds: float) -> dict[str, Any]:
    """`seconds`: from the first request to the last one's end."""
    kinds = Counter(one.kind(right[one.question]) for one in seen)
    whole = [one for one in seen if one.kind(right[one.question]) == "whole"]
    firsts = [one.times[0] - one.due for one in whole]
    gaps = [b - a for one in whole for a, b in zip(one.times, one.times[1:], strict=False)]
    return {
        "requests": len(seen),
        "whole": kinds.pop("whole", 0),
        "wrong": kinds.pop("wrong", 0),
        "stuck": kinds.pop("stuck", 0),
        "refused_429": kinds.pop("429", 0),
        "others": dict(kinds),
        "tokens_per_s": sum(one.question.tokens for one in whole) / seconds,
        **{f"ttft_p{share}_s": percentile(firsts, share) for share in PERCENTILES},
        **{f"gap_p{share}_s": percentile(gaps, share) for share in PERCENTILES},
        "longest_gap_s": max(gaps, default=None),
    }


class LoadTest:
    """Rows of one server."""

    def __init__(self, server: ServerProcess, name: str, deadline_s: float, seed: int) -> None:
        self._server, self._name, self._deadline_s = server, name, deadline_s
        self._draw = random.Random(seed)
        self._questions = questions()

    async def rows(self, shares: Sequence[float], seconds: float, parallel: int, queue: int) -> list[dict[str, Any]]:
        """A row for each rate. `shares`: of the rate at which a closed loop of `parallel` clients is served. The last
        two are the server's."""
        async with Crowd(self._server.url, self._name, self._deadline_s) as crowd:
            right = await lone_answers(crowd, self._questions)
            await warm(crowd, parallel + queue)
            capacity = await self._capacity(crowd, parallel)
            rows = []
            for share in shares:
                say(f"{share:g} of {capacity:.2f} requests/s, for {seconds:.0f} s")
                row = await self._row(crowd, right, share * capacity, seconds)
                rows.append({"part": "load", "share": share, "rate": share * capacity} | row)
            return rows

    async def _capacity(self, crowd: Crowd, parallel: int) -> float:
        """Requests a second of a closed loop."""
        asked = [self._draw.choice(self._questions) for _ in range(3 * parallel)]
        began = time.perf_counter()
        await at_once(parallel, lambda number: crowd.ask(asked[number]), len(asked))
        return len(asked) / (time.perf_counter() - began)

    async def _row(self, crowd: Crowd, right: dict[Question, str], rate: float, seconds: float) -> dict[str, Any]:
        crowd.most_open = 0
        threads = self._server.threads()
        with MemoryWatch(self._server) as memory:
            began = time.perf_counter()
            seen = await arriving(crowd, self._questions, rate, seconds, self._draw)
            took = time.perf_counter() - began
        left = await settled(self._server)
        return {
            **figures(seen, right, took),
            "most_open": crowd.most_open,
            **memory.facts(),
            "requests_left": left,
            "threads_more": self._server.threads() - threads,
        }


async def settled(server: ServerProcess) -> float:
    """Requests that the server still has, once none is left or after `SETTLE_S`."""
    end = time.monotonic() + SETTLE_S
    while True:
        left = sum(await asyncio.to_thread(server.open_requests))
        if not left or time.monotonic() > end:
            return left
        await asyncio.sleep(0.1)


async def cost_rows(
    server: ServerProcess, name: str, engine: EngineAlone, counts: Sequence[int], tokens: int, deadline_s: float
) -> list[dict[str, Any]]:
    """The service over the engine alone, for as many requests at once: both take turns. Ratios are medians of turns."""
    rows = []
    async with Crowd(server.url, name, deadline_s) as crowd:
        for count in counts:
            say(f"service and engine in turns, {count} at once")
            prompts = [gsm8k_prompts(PROMPTS)[number % PROMPTS] for number in range(count)]
            turns = [await _turn(crowd, server, engine, prompts, tokens, odd=bool(n % 2)) for n in range(TURNS + 1)]
            rows.append(
                {"part": "cost", "requests": count, "turns": TURNS, **_medians(turns[1:])}
            )  # the first warms up
    return rows


async def _turn(
    crowd: Crowd, server: ServerProcess, engine: EngineAlone, prompts: list[str], tokens: int, odd: bool
) -> dict[str, float]:
    found: dict[str, float] = {}
    for served in (True, False) if odd else (False, True):
        if served:
            cpu, began = server.cpu_s(), time.perf_counter()
            seen = await asyncio.gather(*(crowd.ask(Question(prompt, tokens)) for prompt in prompts))
            found["service_s"] = max(one.times[-1] for one in seen) - began
            found["service_cpu_s"] = server.cpu_s() - cpu
        else:
            found["engine_s"], found["engine_cpu_s"], _ = await asyncio.to_thread(engine.turn, prompts, tokens)
    return found | {"tokens": float(len(prompts) * tokens)}


def _medians(turns: list[dict[str, float]]) -> dict[str, float]:
    ratios = [one["service_s"] / one["engine_s"] for one in turns]
    cpu = [one["service_cpu_s"] / one["engine_cpu_s"] for one in turns]
    each = {
        name: statistics.median(1e3 * one[name] / one["tokens"] for one in turns)
        for name in ("service_s", "engine_s", "service_cpu_s", "engine_cpu_s")
    }
    return {
        "service_over_engine": statistics.median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
        "cpu_over_engine": statistics.median(cpu),
        **{f"{name.removesuffix('_s')}_ms_a_token": value for name, value in each.items()},
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

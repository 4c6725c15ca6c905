"""What each of 32 streaming clients sees of a fault in the service."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from scripts.lib.prompts import gsm8k_prompts
from scripts.service.clients import Crowd, Question, Seen, lone_answers
from scripts.service.load import PROMPTS, say, settled
from scripts.service.server import ServerProcess

CLIENTS = 32
TOKENS = 48
BEGUN = 4
"""Clients that have their first token when the fault comes."""
DEADLINE_S = 180.0
CASES = ("none", "full queue", "killed worker", "killed main node", "SIGTERM")


def flags(case: str) -> list[str]:
    """Of the server. Where the queue is to be full, half the clients fit."""
    places = ("8", "8") if case == "full queue" else (str(CLIENTS // 2), str(CLIENTS))
    cluster = ("--cluster", "local", "--workers", "3", "--shadow", "none")  # every other node is a worker
    return ["--parallel", places[0], "--queue", places[1], *cluster]


async def row(server: ServerProcess, name: str, case: str) -> dict[str, Any]:
    """One case. The server is that of `flags(case)`."""
    say(f"{CLIENTS} clients stream: {case}")
    asked = [Question(gsm8k_prompts(PROMPTS)[number % PROMPTS], TOKENS) for number in range(CLIENTS)]
    async with Crowd(server.url, name, DEADLINE_S) as crowd:
        right = await lone_answers(crowd, asked)
        begun = asyncio.Semaphore(0)
        told: set[int] = set()

        def note(seen: Seen) -> bool:
            if seen.times and id(seen) not in told:
                told.add(id(seen))
                begun.release()
            return False

        tasks = [asyncio.create_task(crowd.ask(question, leave=note)) for question in asked]
        for _ in range(BEGUN):
            await asyncio.wait_for(begun.acquire(), DEADLINE_S)
        at = time.perf_counter()
        ending = await _FAULTS[case](server)
        seen = await asyncio.gather(*tasks)
        facts = await ending()
        return {
            "part": "fault",
            "case": case,
            "clients": CLIENTS,
            "saw": dict(Counter(one.kind(right[one.question]) for one in seen).most_common()),
            "longest_pause_s": max(_pauses(list(seen)), default=None),
            "last_end_s": max(one.ended for one in seen) - at,
            **facts,
        }


def _pauses(seen: list[Seen]) -> list[float]:
    """Between two tokens of answers that came whole."""
    return [b - a for one in seen if one.done for a, b in zip(one.times, one.times[1:], strict=False)]


Ending = Callable[[], Awaitable[dict[str, Any]]]


async def _none(server: ServerProcess) -> Ending:
    async def ending() -> dict[str, Any]:
        return {"requests_left": await settled(server)}

    return ending


async def _terminate(server: ServerProcess) -> Ending:
    """A late client comes during the drain."""
    began = time.perf_counter()
    server.terminate()

    async def ending() -> dict[str, Any]:
        code = await asyncio.to_thread(server.wait)
        return {"exit_code": code, "ended_after_s": time.perf_counter() - began}

    return ending


def _kill(role: str) -> Callable[[ServerProcess], Awaitable[Ending]]:
    async def kill(server: ServerProcess) -> Ending:
        server.node_processes(role)[0].kill()
        return await _none(server)

    return kill


_FAULTS: dict[str, Callable[[ServerProcess], Awaitable[Ending]]] = {
    "none": _none,
    "full queue": _none,
    "killed worker": _kill("NodeActor"),
    "killed main node": _kill("Main"),
    "SIGTERM": _terminate,
}

"""What each of 32 streaming clients sees of a fault in the service, and what clients see that come after it."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from scripts.service.clients import SPEAKERS, WHOLE, Crowd, Question, Seen
from scripts.service.load import REFUSED, say
from scripts.service.server import ServerProcess
from scripts.service.watching import PERIOD_S, SETTLE_S

CLIENTS = 32
QUEUE = 8
LATE = 16
"""Clients that come after the fault: more than the queue has places for."""
LATE_TOKENS = 8
READY_S = 60.0
"""Longest wait until the service has noticed what it cannot hide."""
CASES = ("full queue", "killed worker", "killed main node", "SIGTERM")
SEES = {
    "full queue": ((WHOLE,), (WHOLE, REFUSED)),
    "killed worker": ((WHOLE,), (WHOLE, REFUSED)),
    "killed main node": (("error event: main_node_lost",), ("503 main_node_lost",)),
    "SIGTERM": ((WHOLE,), ("503 stopping",)),
}
"""What clients may see that stream, and those that come afterwards."""


def flags() -> list[str]:
    """Of the server: all clients that stream are answered at once."""
    places = ("--parallel", str(CLIENTS), "--queue", str(QUEUE))
    return [*places, "--cluster", "local", "--workers", "3", "--shadow", "none"]  # every other node is a worker


def questions(tokens: int) -> tuple[list[Question], list[Question]]:
    """Of the clients that stream, for `tokens` each, and of the late ones."""
    places = range(CLIENTS)
    streaming = [Question(SPEAKERS[n % len(SPEAKERS)], tokens, n // len(SPEAKERS) or None) for n in places]
    return streaming, [Question(SPEAKERS[n % len(SPEAKERS)], LATE_TOKENS) for n in range(LATE)]


async def rows(
    server: ServerProcess, name: str, case: str, tokens: int, right: dict[Question, str], deadline_s: float
) -> AsyncIterator[dict[str, Any]]:
    """One case. The server is that of `flags`. `right`: the engine's own answers to `questions(tokens)`."""
    say(f"{CLIENTS} clients stream: {case}")
    asked, asked_late = questions(tokens)
    async with Crowd(server.url, name, deadline_s) as crowd:
        streaming, count = await all_streaming(crowd, asked)
        at = time.monotonic()
        await _FAULTS[case](server)
        late = [asyncio.create_task(crowd.ask(question)) for question in asked_late]
        early, late_ones = list(await asyncio.gather(*streaming)), list(await asyncio.gather(*late))
    facts = {"case": case, "streaming_at_fault": count, **await _end(server, case)}
    for clients, seen in (("streaming", early), ("late", late_ones)):
        for row in rows_of(clients, seen, right, at, facts):
            yield row


async def all_streaming(crowd: Crowd, asked: Sequence[Question]) -> tuple[list[asyncio.Task[Seen]], int]:
    """Requests once each has its first token, or once one has ended before that; and how many stream then."""
    begun: dict[int, Seen] = {}
    all_begun = asyncio.Event()

    def hear(seen: Seen) -> None:
        if seen.times:
            begun[id(seen)] = seen
        if len(begun) == len(asked):
            all_begun.set()

    tasks = [asyncio.create_task(crowd.ask(question, hear=hear)) for question in asked]
    waiting = asyncio.create_task(all_begun.wait())
    await asyncio.wait((waiting, *tasks), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return tasks, sum(one.streaming for one in begun.values())


def rows_of(
    clients: str, seen: Sequence[Seen], right: dict[Question, str], at: float, facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """A row for each thing that clients saw. `at`: when the fault came."""
    groups: dict[tuple[str, str], list[Seen]] = defaultdict(list)
    for one in seen:
        groups[one.kind(right[one.question]), one.sameness(right[one.question])].append(one)
    return [
        {
            "part": "fault",
            **facts,
            "clients": clients,
            "count": len(some),
            "saw": kind,
            "tokens": sameness,
            "longest_pause_s": max((pause for one in some for pause in pauses(one, at)), default=None),
            "last_end_s": max(one.ended for one in some) - at,
        }
        for (kind, sameness), some in sorted(groups.items(), key=lambda group: -len(group[1]))
    ]


def pauses(seen: Seen, at: float) -> list[float]:
    """Between two events with text, those that ended after `at`."""
    return [b - a for a, b in zip(seen.times, seen.times[1:], strict=False) if b > at]


async def _end(server: ServerProcess, case: str) -> dict[str, Any]:
    """What is left of the requests; or the exit code."""
    if case == "SIGTERM":
        return {"exit_code": await asyncio.to_thread(server.wait)}
    end = time.monotonic() + SETTLE_S
    while (left := sum(await asyncio.to_thread(server.open_requests))) and time.monotonic() < end:
        await asyncio.sleep(PERIOD_S)
    return {"requests_left": left}


async def _nothing(server: ServerProcess) -> None:
    """The late clients themselves fill the queue."""


async def _terminate(server: ServerProcess) -> None:
    server.terminate()
    await _unready(server)


def _kill(role: str, hidden: bool) -> Callable[[ServerProcess], Awaitable[None]]:
    async def kill(server: ServerProcess) -> None:
        server.node_processes(role)[0].kill()
        if not hidden:
            await _unready(server)

    return kill


async def _unready(server: ServerProcess) -> None:
    """Until the service says that it cannot answer. Raises TimeoutError."""
    async with asyncio.timeout(READY_S):
        while await asyncio.to_thread(server.ready):
            await asyncio.sleep(PERIOD_S)


_FAULTS: dict[str, Callable[[ServerProcess], Awaitable[None]]] = {
    "full queue": _nothing,
    "killed worker": _kill("NodeActor", hidden=True),
    "killed main node": _kill("Main", hidden=False),
    "SIGTERM": _terminate,
}

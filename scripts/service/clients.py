"""Clients of a service, many at once in one event loop. Each streams one completion and notes what it saw."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

CONNECT_S = 30.0


@dataclass(frozen=True, slots=True)
class Question:
    prompt: str
    tokens: int


@dataclass(slots=True)
class Seen:
    """What one client saw."""

    question: Question
    due: float
    """When it wanted to ask, by `time.perf_counter`."""
    times: list[float] = field(default_factory=list)
    """Of each event with text or an end."""
    text: str = ""
    status: int = 0
    """0: no answer."""
    finish: str | None = None
    error: str = ""
    """The code of an error event or object, or what broke the connection."""
    done: bool = False
    """The stream's last event came."""
    ended: float = 0.0

    def kind(self, right: str | None) -> str:
        """`right`: the text that a lone request got; None: not known."""
        if self.status == 429:
            return "429"
        if self.status and self.status != 200:
            return f"refused {self.status}"
        if self.error == "stuck":
            return "stuck"
        if self.error:
            return f"error event: {self.error}" if self.status == 200 and self.done else f"cut: {self.error}"
        if not self.done:
            return "cut: no end"
        return "whole" if right is None or self.text == right else "wrong"


Leave = Callable[[Seen], bool]
"""Whether the client goes, asked after every event."""


class Crowd:
    """Clients of one server. Every request has a connection of its own, as programs that ask once have."""

    def __init__(self, url: str, model: str, deadline_s: float) -> None:
        self._url, self._model, self._deadline_s = url, model, deadline_s
        self.open = 0
        self.most_open = 0

    async def __aenter__(self) -> Crowd:
        self._client = httpx2.AsyncClient(
            base_url=self._url,
            headers={"Accept-Encoding": "identity"},
            timeout=httpx2.Timeout(self._deadline_s, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(self, question: Question, due: float | None = None, leave: Leave = lambda seen: False) -> Seen:
        """Stream one greedy completion. It is stuck where it takes longer than the deadline."""
        seen = Seen(question, time.perf_counter() if due is None else due)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._stream(seen, leave)
        except TimeoutError:
            seen.error = "stuck"
        except httpx2.HTTPError as error:
            seen.error = seen.error or type(error).__name__
        finally:
            self.open -= 1
            seen.ended = time.perf_counter()
        return seen

    async def _stream(self, seen: Seen, leave: Leave) -> None:
        body = {
            "model": self._model,
            "prompt": seen.question.prompt,
            "max_tokens": seen.question.tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            seen.status = answer.status_code
            if answer.status_code != 200:
                seen.error = _code(await answer.aread())
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    _note(seen, line[6:])
                    if leave(seen):
                        return


def _code(body: bytes) -> str:
    try:
        told: Any = json.loads(body)["error"]
        return str(told.get("code") or told.get("type"))
    except (ValueError, LookupError, TypeError):
        return "no error object"


def _note(seen: Seen, data: str) -> None:
    if data == "[DONE]":
        seen.done = True
        return
    event = json.loads(data)
    if "error" in event:
        seen.error, seen.done = str(event["error"].get("code") or event["error"].get("type")), True
        return
    for choice in event["choices"]:
        seen.times.append(time.perf_counter())
        seen.text += choice["text"]
        seen.finish = choice["finish_reason"] or seen.finish


async def warm(crowd: Crowd, places: int) -> None:
    """Fill every place of the server once: it keeps the threads that it has begun."""
    await asyncio.gather(*(crowd.ask(Question("HAMLET:", 1)) for _ in range(places)))


async def lone_answers(crowd: Crowd, questions: list[Question]) -> dict[Question, str]:
    """What each question is answered when nobody else asks. Raises RuntimeError where one is not answered."""
    found = {}
    for question in dict.fromkeys(questions):
        seen = await crowd.ask(question)
        if seen.kind(None) != "whole":
            raise RuntimeError(f"a lone request was not answered: {seen.kind(None)} ({seen.error})")
        found[question] = seen.text
    return found


async def arriving(
    crowd: Crowd, questions: list[Question], rate: float, seconds: float, draw: random.Random
) -> list[Seen]:
    """Open loop: clients come at times of a Poisson process of `rate` a second, however many are being answered."""
    began = time.perf_counter()
    due, tasks = began, []
    while True:
        due += draw.expovariate(rate)
        if due > began + seconds:
            break
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(crowd.ask(draw.choice(questions), due)))
    return list(await asyncio.gather(*tasks))


async def at_once(count: int, ask: Callable[[int], Awaitable[Seen]], total: int) -> list[Seen]:
    """Closed loop: `count` clients share `total` requests."""
    left = iter(range(total))

    async def client() -> list[Seen]:
        return [await ask(number) for number in left]

    return [one for of in await asyncio.gather(*(client() for _ in range(count))) for one in of]

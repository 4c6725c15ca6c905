"""Clients of a service, many at once in one event loop. Each streams one completion and notes what it saw.

Times are those of `time.monotonic`, which is one clock for all processes of a machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import httpx2

from scripts.lib.prompts import gsm8k_prompts

CONNECT_S = 30.0
PROMPTS = 8
SPEAKERS = tuple(f"{name}:" for name in ("HAMLET", "ROMEO", "JULIET", "OPHELIA", "MACBETH", "PROSPERO", "LEAR", "PUCK"))
"""Prompts of few tokens, where the time is to go into answers."""
LENGTHS = (8, 16, 32)
"""Tokens of answers."""
TEMPERATURE = 0.8
"""Of answers that are drawn."""


@dataclass(frozen=True, slots=True)
class Question:
    """`seed`: of an answer that is drawn; None: the greedy one."""

    prompt: str
    tokens: int
    seed: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """How it is drawn, by names that the API and `odmoe.load` share; their defaults differ, so nothing is left
        to them."""
        if self.seed is None:
            return {"temperature": 0}
        return {"temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0, "seed": self.seed}


def questions() -> list[Question]:
    """Every prompt in every length; every second one is drawn."""
    pairs = [(prompt, tokens) for prompt in gsm8k_prompts(PROMPTS) for tokens in LENGTHS]
    return [Question(*pair, seed=number if number % 2 else None) for number, pair in enumerate(pairs)]


@dataclass(slots=True)
class Seen:
    """What one client saw."""

    question: Question
    due: float
    """When it wanted to ask."""
    times: list[float] = field(default_factory=list)
    """Of each event with text. An event may have several tokens."""
    text: str = ""
    tokens: int | None = None
    """As the stream's last event counts them."""
    status: int = 0
    """0: no answer."""
    retry_after: str | None = None
    error: str = ""
    """The code of an error event or object, or what broke the connection."""
    done: bool = False
    """The stream's last event came, or the error object."""
    left: float | None = None
    """When it hung up."""
    ended: float = 0.0

    @property
    def streaming(self) -> bool:
        """It has its first token and not its last."""
        return bool(self.times) and not self.ended

    def kind(self, right: str | None) -> str:
        """In words. `right`: the engine's own text for the question; None: not known."""
        if self.left is not None:
            return LEFT if self.times else LEFT_EARLY
        if self.error == STUCK:
            return STUCK
        if self.status not in (0, 200):
            return f"{self.status} {self.error}"
        if self.error:
            return f"error event: {self.error}" if self.done else f"cut: {self.error}"
        if not self.done:
            return "cut: no end"
        whole = right is None or (self.text == right and self.tokens == self.question.tokens)
        return WHOLE if whole else WRONG

    def sameness(self, right: str) -> str:
        """How its text compares with the engine's own."""
        if not self.text:
            return "none"
        if self.text == right and self.done and not self.error:
            return "all the same"
        return "the same so far" if right.startswith(self.text) else "others"


WHOLE, WRONG, STUCK = "whole", "wrong", "stuck"
LEFT, LEFT_EARLY = "left in mid-answer", "left before the first token"
Hear = Callable[[Seen], object]
"""Called after each event."""


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

    def ask(
        self, question: Question, due: float | None = None, hear: Hear = lambda seen: None
    ) -> Coroutine[Any, Any, Seen]:
        """Stream one completion. It is stuck where it takes longer than the deadline."""
        return self._ask(Seen(question, time.monotonic() if due is None else due), hear)

    async def ask_and_leave(self, question: Question, after: int, then_s: float) -> Seen:
        """Hang up `then_s` after the event with text number `after`, or after the question where that is 0, unless the
        answer ends before."""
        seen = Seen(question, time.monotonic())
        reached = asyncio.Event()

        def hear(seen: Seen) -> None:
            if len(seen.times) >= after:
                reached.set()

        asking = asyncio.create_task(self._ask(seen, hear))
        if after:
            waiting = asyncio.create_task(reached.wait())
            await asyncio.wait((asking, waiting), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        await asyncio.wait((asking,), timeout=then_s)
        if not asking.done():
            seen.left = time.monotonic()
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
        return seen

    async def _ask(self, seen: Seen, hear: Hear) -> Seen:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._stream(seen, hear)
        except TimeoutError:
            seen.error = STUCK
        except httpx2.HTTPError as error:
            seen.error = seen.error or type(error).__name__
        finally:
            self.open -= 1
            seen.ended = time.monotonic()
        return seen

    async def _stream(self, seen: Seen, hear: Hear) -> None:
        body = body_of(self._model, seen.question)
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            seen.status = answer.status_code
            if answer.status_code != 200:
                seen.retry_after = answer.headers.get("Retry-After")
                seen.error, seen.done = _code(await answer.aread()), True
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    _note(seen, line[6:])
                    hear(seen)


def body_of(model: str, question: Question) -> dict[str, Any]:
    """The request."""
    return {
        "model": model,
        "prompt": question.prompt,
        "max_tokens": question.tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        **question.options,
    }


def _code(body: bytes) -> str:
    try:
        told: Any = json.loads(body)["error"]
        return str(told.get("code") or told.get("type"))
    except (ValueError, LookupError, TypeError):
        return "without an error object"


def _note(seen: Seen, data: str) -> None:
    """An event. One without text, which ends an answer, is no token's."""
    if data == "[DONE]":
        seen.done = True
        return
    event = json.loads(data)
    if "error" in event:
        seen.error, seen.done = str(event["error"].get("code") or event["error"].get("type")), True
        return
    if event.get("usage"):
        seen.tokens = event["usage"]["completion_tokens"]
    for choice in event["choices"]:
        if choice["text"]:
            seen.times.append(time.monotonic())
            seen.text += choice["text"]


async def fill(crowd: Crowd, places: int, tokens: int = 1) -> list[Seen]:
    """Ask for `places` short answers at once. The server keeps the threads that it begins for them."""
    question = Question(SPEAKERS[0], tokens)
    return list(await asyncio.gather(*(crowd.ask(question) for _ in range(places))))


async def arriving(
    crowd: Crowd, questions: list[Question], rate: float, seconds: float, draw: random.Random
) -> list[Seen]:
    """Open loop: clients come at times of a Poisson process of `rate` a second, however many are being answered."""
    due = began = time.monotonic()
    tasks = []
    for after in arrivals(rate, seconds, draw):
        due = began + after
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(crowd.ask(draw.choice(questions), due)))
    return list(await asyncio.gather(*tasks))


def arrivals(rate: float, seconds: float, draw: random.Random) -> list[float]:
    """Times of a Poisson process of `rate` a second, from 0 to `seconds`."""
    times = []
    after = draw.expovariate(rate)
    while after <= seconds:
        times.append(after)
        after += draw.expovariate(rate)
    return times


async def at_once(count: int, ask: Callable[[int], Awaitable[Seen]], total: int) -> list[Seen]:
    """Closed loop: `count` clients share `total` requests."""
    left = iter(range(total))

    async def client() -> list[Seen]:
        return [await ask(number) for number in left]

    return [one for of in await asyncio.gather(*(client() for _ in range(count))) for one in of]

"""What the service costs a token over the engine alone."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from scripts.lib.prompts import gsm8k_prompts
from scripts.service.clients import PROMPTS, Question, body_of
from scripts.service.engine import EngineAlone
from scripts.service.load import percentile, say
from scripts.service.server import ServerProcess

TURN_S = 900.0


async def cost_rows(
    server: ServerProcess, name: str, engine: EngineAlone, counts: Sequence[int], tokens: int, turns: int
) -> AsyncIterator[dict[str, Any]]:
    """The service over the engine alone, for as many requests at once as `counts` says: both take turns on the same
    machine, whichever was second is first in the next. Ratios are of two turns that follow each other."""
    for count in counts:
        say(f"service and engine in turns, {count} at once")
        prompts = gsm8k_prompts(PROMPTS)
        asked = [Question(prompts[number % PROMPTS], tokens) for number in range(count)]
        found = [await _turn(server, name, engine, asked, served_first=bool(n % 2)) for n in range(turns + 1)]
        figures = summary(found[1:], count * tokens)  # the first warms up
        yield {"part": "cost", "requests": count, "turns": turns, **figures}


async def _turn(
    server: ServerProcess, name: str, engine: EngineAlone, asked: list[Question], served_first: bool
) -> dict[str, float]:
    found: dict[str, float] = {}
    for served in (served_first, not served_first):
        if served:
            cpu, began = server.cpu_s(), time.monotonic()
            async with asyncio.timeout(TURN_S):
                ended = await asyncio.gather(*(last_token(server.url, name, question) for question in asked))
            found["service_s"], found["service_cpu_s"] = max(ended) - began, server.cpu_s() - cpu
        else:
            found["engine_s"], found["engine_cpu_s"] = await asyncio.to_thread(engine.turn, asked)
    return found


async def last_token(url: str, model: str, question: Question) -> float:
    """When a whole answer had come, to a client that does as little as it can: it shares the machine with the server.
    Raises RuntimeError where the answer is not whole."""
    address = urlsplit(url)
    body = json.dumps(body_of(model, question)).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\nContent-Length: {len(body)}"
    )
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(head.encode() + b"\r\n\r\n" + body)
        received = await reader.read()
        ended = time.monotonic()
    finally:
        writer.close()
    if b"data: [DONE]" not in received:
        raise RuntimeError(f"an answer is not whole: {received[-300:]!r}")
    return ended


def summary(turns: list[dict[str, float]], tokens: int) -> dict[str, Any]:
    """Medians. `tokens`: of a turn."""
    ratios = [one["service_s"] / one["engine_s"] for one in turns]
    each = {
        f"{name.removesuffix('_s')}_ms_a_token": statistics.median(1e3 * one[name] / tokens for one in turns)
        for name in ("service_s", "engine_s", "service_cpu_s", "engine_cpu_s")
    }
    return {
        "service_over_engine": statistics.median(ratios),
        "ratio_p25": percentile(ratios, 25),
        "ratio_p75": percentile(ratios, 75),
        "cpu_over_engine": statistics.median(one["service_cpu_s"] / one["engine_cpu_s"] for one in turns),
        **each,
    }

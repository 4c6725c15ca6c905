"""Routes that compute something small from a body, without the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from odmoe.serve.bounds.memory import TOKEN_BYTES
from odmoe.serve.openai.requests import read_object
from odmoe.serve.sse import WholeResponse, encode
from odmoe.serve.under_way import RequestUnderWay

if TYPE_CHECKING:
    from odmoe.serve.service import Service

Compute = Callable[["Service", dict[str, Any]], dict[str, Any]]
"""A body's object -> that of the response. In a thread. Raises ApiError, ODMoEError."""


class ComputedRoute:
    """Bodies have the bounds of requests for answers, and are taken apart where those are."""

    def __init__(self, service: Service, compute: Compute) -> None:
        self._service, self._compute = service, compute

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, loop = self._service, asyncio.get_running_loop()
        with RequestUnderWay(service, Request(scope, receive, send)) as under_way:
            body = await under_way.read_body()
            given = await under_way.unless_stopped(loop.run_in_executor(service.body_pool, read_object, body))
            found = await under_way.unless_stopped(asyncio.to_thread(self._compute, service, given))
            under_way.held.add(TOKEN_BYTES * len(found.get("tokens", ())))
            await WholeResponse(await asyncio.to_thread(encode, found))(scope, receive, send)
            await under_way.settle()

"""The routes that answer prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from odmoe.serve.api_error import ClientGoneError, log_defect, told
from odmoe.serve.openai import chat, completions
from odmoe.serve.openai.parts import Shape, parts_of, usage_of
from odmoe.serve.openai.requests import AnswerRequest, ChatRequest, CompletionRequest, parse
from odmoe.serve.sse import DONE, EventStream, encode, event
from odmoe.serve.under_way import RequestUnderWay

if TYPE_CHECKING:
    from fastapi import FastAPI

    from odmoe.serve.answers import Got
    from odmoe.serve.exchange import Exchange
    from odmoe.serve.openai.engine_request import EngineRequest
    from odmoe.serve.service import Service

Read = Callable[["Service", bytes, str], tuple[AnswerRequest, "EngineRequest", Shape]]
"""A body and the request's id -> what it asks for, and how it is answered. In a thread: it encodes prompts."""


_MANY = 64
"""Pieces of answers that are encoded elsewhere than on the event loop."""


def add_answers(app: FastAPI, service: Service) -> None:
    """`/v1/completions`, `/v1/chat/completions`."""
    for path, read in (("/v1/completions", _read_completion), ("/v1/chat/completions", _read_chat)):
        app.router.routes.append(Route(path, _Answering(service, read), methods=["POST"]))


def _read_completion(service: Service, body: bytes, record_id: str) -> tuple[AnswerRequest, EngineRequest, Shape]:
    found = parse(CompletionRequest, body)
    service.check_name(found.model)
    wanted, texts = completions.to_engine_request(service, found)
    return found, wanted, completions.CompletionShape(service, found, wanted, texts, record_id)


def _read_chat(service: Service, body: bytes, record_id: str) -> tuple[AnswerRequest, EngineRequest, Shape]:
    found = parse(ChatRequest, body)
    service.check_name(found.model)
    wanted, text = chat.to_engine_request(service, found)
    return found, wanted, chat.ChatShape(service, found, wanted, text, record_id)


class _Answering:
    """Under way from a request's headers to the end of its response, which a function that returns a response does not
    see."""

    def __init__(self, service: Service, read: Read) -> None:
        self._service, self._read = service, read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        with RequestUnderWay(self._service, request) as under_way:
            try:
                response = await self._response(under_way)
                await response(scope, receive, send)
            except ClientGoneError:
                raise
            except Exception as error:
                log_defect(error)
                raise told(error) from error
            await under_way.settle()

    async def _response(self, under_way: RequestUnderWay) -> Response:
        """What fails before the first event is an HTTP error, whether a stream was asked for or not."""
        service, record = self._service, under_way.record
        body = await under_way.read_body()
        found, wanted, shape = await under_way.unless_stopped(asyncio.to_thread(self._read, service, body, record.id))
        record.model, record.stream, record.prompt_tokens = service.name, found.stream, wanted.prompt_tokens
        exchange = under_way.begin(wanted)
        if found.stream:
            return EventStream(_events(exchange, shape, found.include_usage), _last_event)
        got: list[Got] = []
        while not exchange.whole:
            got += await exchange.take()
        usage = usage_of(wanted.prompt_tokens, _tokens(exchange))
        data = await under_way.unless_stopped(asyncio.to_thread(_whole, shape, got, usage))
        return Response(data, media_type="application/json")


async def _events(exchange: Exchange, shape: Shape, usage: bool) -> AsyncGenerator[bytes, None]:
    """The whole stream."""
    while not exchange.whole:
        got = await exchange.take()
        # Encoding many pieces takes long, and other requests wait meanwhile.
        data = _encoded(shape, got) if len(got) < _MANY else await asyncio.to_thread(_encoded, shape, got)
        if data:
            yield data
    if usage:
        yield event(shape.usage_chunk(usage_of(exchange.wanted.prompt_tokens, _tokens(exchange))))
    yield DONE


def _last_event(error: Exception) -> bytes:
    """Of a stream that fails. None where nobody reads it."""
    if isinstance(error, ClientGoneError):
        return b""
    log_defect(error)
    return event(told(error).as_object())


def _whole(shape: Shape, got: list[Got], usage: dict[str, Any]) -> bytes:
    """The response."""
    return encode(shape.response(parts_of(got), usage))


def _encoded(shape: Shape, got: list[Got]) -> bytes:
    return b"".join(event(chunk) for part in parts_of(got) for chunk in shape.chunks(part))


def _tokens(exchange: Exchange) -> int:
    return exchange.tokens if exchange.wanted.max_new_tokens else 0

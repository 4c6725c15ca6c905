"""The routes that answer prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from odmoe.serve.anthropic.request import read_messages
from odmoe.serve.api_error import ClientGoneError, to_api_error
from odmoe.serve.bounds.memory import TOKEN_BYTES
from odmoe.serve.ollama.events import Preload, preloaded
from odmoe.serve.ollama.request import model_name, read_chat, read_generate
from odmoe.serve.openai import chat, completions
from odmoe.serve.openai.parts import Shape, usage_of
from odmoe.serve.openai.requests import ChatRequest, CompletionRequest, read_object, to_request
from odmoe.serve.responses.request import read_response
from odmoe.serve.sse import EventStream, WholeResponse, encode
from odmoe.serve.translated import Head, Translated
from odmoe.serve.under_way import RequestUnderWay
from odmoe.serve.writers import OpenAIWriter, ResponseWriter, TranslatedWriter

if TYPE_CHECKING:
    from fastapi import FastAPI

    from odmoe.serve.answers import AnswerEvent
    from odmoe.serve.bounds.memory import Held
    from odmoe.serve.exchange import Exchange
    from odmoe.serve.openai.engine_request import EngineRequest
    from odmoe.serve.request_fields import UnknownFields
    from odmoe.serve.service import Service


Asked = ChatRequest | CompletionRequest | Translated
"""A request that was read."""
Read = Callable[[dict[str, Any], "UnknownFields"], Any]
"""A body's object -> the request."""

_MANY = 64
"""Pieces of answers that are encoded elsewhere than on the event loop."""


def add_answers(app: FastAPI, service: Service) -> None:
    """OpenAI's routes, and those that are translated into its chats and completions."""
    readers: dict[str, Read] = {
        "/v1/completions": partial(to_request, CompletionRequest),
        "/v1/chat/completions": partial(to_request, ChatRequest),
        "/v1/responses": read_response,
        "/v1/messages": read_messages,
        "/api/chat": read_chat,
        "/api/generate": read_generate,
    }
    for path, read in readers.items():
        app.router.routes.append(Route(path, _Answering(service, read), methods=["POST"]))


def _prepare(service: Service, found: Asked, record_id: str) -> tuple[EngineRequest, ResponseWriter]:
    """What the engine is to do for a request, and how it is answered. In a thread: it encodes prompts."""
    if isinstance(found, Translated):
        with found.own_names():
            wanted, shape = _begin(service, found.request, record_id)
        return wanted, TranslatedWriter(shape, found.translate(Head(record_id, found.model, wanted.prompt_tokens)))
    wanted, shape = _begin(service, found, record_id)
    return wanted, OpenAIWriter(shape, found.include_usage)


def _begin(service: Service, found: ChatRequest | CompletionRequest, record_id: str) -> tuple[EngineRequest, Shape]:
    """The engine has the prompt then, and the request no more."""
    service.check_name(found.model)
    if isinstance(found, ChatRequest):
        wanted, text = chat.to_engine_request(service, found)
        found.messages = []
        return wanted, chat.ChatShape(service, found, wanted, text, record_id)
    wanted, texts = completions.to_engine_request(service, found)
    found.prompt = ""
    return wanted, completions.CompletionShape(service, found, wanted, texts, record_id)


class _Answering:
    """Under way from a request's headers to the end of its response, which a function that returns a response does not
    see."""

    def __init__(self, service: Service, read: Read) -> None:
        self._service, self._read_request = service, read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        with RequestUnderWay(self._service, request) as under_way:
            try:
                response = await self._response(under_way)
                await response(scope, receive, send)
            except ClientGoneError:
                raise
            except Exception as error:
                self._service.log_failure(under_way.record.id, error)
                raise to_api_error(error, under_way.record.id) from error
            await under_way.settle()

    async def _response(self, under_way: RequestUnderWay) -> Response:
        """What fails before the first event is an HTTP error, whether a stream was asked for or not."""
        service, record = self._service, under_way.record
        found = await self._read(under_way)
        if isinstance(found, Preload):
            service.check_name(model_name(found.model))
            record.model, record.finish = service.name, "load"
            return Response(encode(preloaded(found)), media_type="application/json")
        wanted, writer = await under_way.unless_stopped(asyncio.to_thread(_prepare, service, found, record.id))
        under_way.held.add(TOKEN_BYTES * wanted.prompt_tokens)
        record.model, record.stream, record.prompt_tokens = service.name, found.stream, wanted.prompt_tokens
        exchange = under_way.begin(wanted)
        if found.stream:
            events = _events(exchange, writer, under_way.held)
            failed = partial(_last_event, service, record.id, writer)
            return EventStream(events, failed, None, writer.media_type, writer.ping)
        got: list[AnswerEvent] = []
        while not exchange.whole:
            got += await exchange.take()
        usage = usage_of(wanted.prompt_tokens, _tokens(exchange), exchange.cached_tokens)
        return WholeResponse(await under_way.unless_stopped(asyncio.to_thread(writer.whole, got, usage)))

    async def _read(self, under_way: RequestUnderWay) -> Asked | Preload:
        body = await under_way.read_body()
        loop = asyncio.get_running_loop()
        return await under_way.unless_stopped(loop.run_in_executor(self._service.body_pool, self._parse, body))

    def _parse(self, body: bytearray) -> Asked | Preload:
        found: Asked | Preload = self._read_request(read_object(body), self._service.unknown_fields)
        return found


async def _events(exchange: Exchange, writer: ResponseWriter, held: Held) -> AsyncGenerator[bytes, None]:
    """The whole stream. `held`: by results until the client has them."""
    begin = writer.begin()
    while not exchange.whole:
        got = await exchange.take()
        # Encoding many pieces takes long, and other requests wait meanwhile.
        data = writer.events(got) if len(got) < _MANY else await asyncio.to_thread(writer.events, got)
        if begin or data:
            yield begin + data
            begin = b""
        held.free_results(got)
    usage = usage_of(exchange.wanted.prompt_tokens, _tokens(exchange), exchange.cached_tokens)
    if end := writer.end(usage):
        yield end


def _last_event(service: Service, request_id: str, writer: ResponseWriter, error: Exception) -> bytes:
    """Of a stream that fails. None if nobody reads it."""
    if isinstance(error, ClientGoneError):
        return b""
    service.log_failure(request_id, error)
    return writer.error(to_api_error(error, request_id))


def _tokens(exchange: Exchange) -> int:
    return exchange.tokens if exchange.wanted.max_new_tokens else 0

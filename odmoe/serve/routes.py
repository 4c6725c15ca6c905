"""The routes that answer prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from odmoe.serve.api_error import ClientGoneError, to_api_error
from odmoe.serve.bounds.memory import TOKEN_BYTES
from odmoe.serve.openai import chat, completions
from odmoe.serve.openai.parts import Shape, parts_of, usage_of
from odmoe.serve.openai.requests import AnswerRequest, ChatRequest, CompletionRequest, parse
from odmoe.serve.sse import DONE, EventStream, WholeResponse, encode, encoded_parts, event
from odmoe.serve.under_way import RequestUnderWay

if TYPE_CHECKING:
    from fastapi import FastAPI

    from odmoe.serve.answers import AnswerEvent
    from odmoe.serve.bounds.memory import Held
    from odmoe.serve.exchange import Exchange
    from odmoe.serve.openai.engine_request import EngineRequest
    from odmoe.serve.service import Service


class Api(NamedTuple):
    """One of the two APIs."""

    kind: type[AnswerRequest]
    """Of its requests."""
    prepare: Callable[[Service, Any, str], tuple[EngineRequest, Shape]]
    """A request and its id -> what the engine is to do, and how it is answered. In a thread: it encodes prompts."""


_MANY = 64
"""Pieces of answers that are encoded elsewhere than on the event loop."""


def add_answers(app: FastAPI, service: Service) -> None:
    """`/v1/completions`, `/v1/chat/completions`."""
    apis = {
        "/v1/completions": Api(CompletionRequest, _prepare_completion),
        "/v1/chat/completions": Api(ChatRequest, _prepare_chat),
    }
    for path, api in apis.items():
        app.router.routes.append(Route(path, _Answering(service, api), methods=["POST"]))


def _prepare_completion(service: Service, found: CompletionRequest, record_id: str) -> tuple[EngineRequest, Shape]:
    service.check_name(found.model)
    wanted, texts = completions.to_engine_request(service, found)
    found.prompt = ""  # the engine has it
    return wanted, completions.CompletionShape(service, found, wanted, texts, record_id)


def _prepare_chat(service: Service, found: ChatRequest, record_id: str) -> tuple[EngineRequest, Shape]:
    service.check_name(found.model)
    wanted, text = chat.to_engine_request(service, found)
    found.messages = []
    return wanted, chat.ChatShape(service, found, wanted, text, record_id)


class _Answering:
    """Under way from a request's headers to the end of its response, which a function that returns a response does not
    see."""

    def __init__(self, service: Service, api: Api) -> None:
        self._service, self._api = service, api

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
        wanted, shape = await under_way.unless_stopped(asyncio.to_thread(self._api.prepare, service, found, record.id))
        under_way.held.add(TOKEN_BYTES * wanted.prompt_tokens)
        record.model, record.stream, record.prompt_tokens = service.name, found.stream, wanted.prompt_tokens
        exchange = under_way.begin(wanted)
        if found.stream:
            events = _events(exchange, shape, found.include_usage, under_way.held)
            return EventStream(events, partial(_last_event, service, record.id))
        got: list[AnswerEvent] = []
        while not exchange.whole:
            got += await exchange.take()
        usage = usage_of(wanted.prompt_tokens, _tokens(exchange), exchange.cached_tokens)
        return WholeResponse(await under_way.unless_stopped(asyncio.to_thread(_whole, shape, got, usage)))

    async def _read(self, under_way: RequestUnderWay) -> AnswerRequest:
        body = await under_way.read_body()
        loop = asyncio.get_running_loop()
        return await under_way.unless_stopped(
            loop.run_in_executor(self._service.body_pool, parse, self._api.kind, body)
        )


async def _events(exchange: Exchange, shape: Shape, usage: bool, held: Held) -> AsyncGenerator[bytes, None]:
    """The whole stream. `held`: by results until the client has them."""
    while not exchange.whole:
        got = await exchange.take()
        # Encoding many pieces takes long, and other requests wait meanwhile.
        data = _encode_events(shape, got) if len(got) < _MANY else await asyncio.to_thread(_encode_events, shape, got)
        if data:
            yield data
        held.free_results(got)
    if usage:
        yield event(
            shape.usage_chunk(usage_of(exchange.wanted.prompt_tokens, _tokens(exchange), exchange.cached_tokens))
        )
    yield DONE


def _last_event(service: Service, request_id: str, error: Exception) -> bytes:
    """Of a stream that fails. None where nobody reads it."""
    if isinstance(error, ClientGoneError):
        return b""
    service.log_failure(request_id, error)
    return event(to_api_error(error, request_id).as_object())


def _whole(shape: Shape, got: list[AnswerEvent], usage: dict[str, Any]) -> bytes:
    """The response. Choice by choice: what is written needs several times the memory until it is."""
    parts = parts_of(got)
    got.clear()
    before, named, after = encode(shape.response([], usage)).partition(b'"choices":[')
    body = bytearray(before + named)
    parts.reverse()
    while parts:
        (choice,) = shape.response([parts.pop()], usage)["choices"]
        for piece in encoded_parts(choice):
            body += piece
        body += b"," if parts else b""
    return bytes(body + after)


def _encode_events(shape: Shape, got: list[AnswerEvent]) -> bytes:
    return b"".join(event(chunk) for part in parts_of(got) for chunk in shape.chunks(part))


def _tokens(exchange: Exchange) -> int:
    return exchange.tokens if exchange.wanted.max_new_tokens else 0

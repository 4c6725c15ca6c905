"""The routes that answer prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from odmoe.serve.body import read_body
from odmoe.serve.errors import ApiError, ClientGoneError, log_defect, told
from odmoe.serve.exchange import Exchange
from odmoe.serve.openai import chat, completions
from odmoe.serve.openai.parts import Part, Shape, parts_of, usage_of
from odmoe.serve.openai.requests import AnswerRequest, ChatRequest, CompletionRequest, parse
from odmoe.serve.sse import DONE, EventStream, encode, event

if TYPE_CHECKING:
    from fastapi import FastAPI

    from odmoe.serve.answers import Got
    from odmoe.serve.openai.engine_request import EngineRequest
    from odmoe.serve.service import Service


def add_answers(app: FastAPI, service: Service) -> None:
    """`/v1/completions`, `/v1/chat/completions`."""

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        found = parse(CompletionRequest, await _body(service, request))
        service.check_name(found.model)
        wanted, texts = await asyncio.to_thread(completions.to_engine_request, service, found)
        shape = completions.CompletionShape(service, found, wanted, texts, request.state.record.id)
        return await _respond(service, request, found, wanted, shape)

    @app.post("/v1/chat/completions")
    async def answer(request: Request) -> Response:
        found = parse(ChatRequest, await _body(service, request))
        service.check_name(found.model)
        wanted, text = await asyncio.to_thread(chat.to_engine_request, service, found)
        shape = chat.ChatShape(service, found, wanted, text, request.state.record.id)
        return await _respond(service, request, found, wanted, shape)


async def _body(service: Service, request: Request) -> bytes:
    if service.stopping:
        raise ApiError(503, "the server is stopping; it takes no more requests", "server_error", code="stopping")
    return await read_body(request, service.limits.body_bytes)


async def _respond(
    service: Service, request: Request, found: AnswerRequest, wanted: EngineRequest, shape: Shape
) -> Response:
    """The answers as one response, or as events. What fails before the first token is an HTTP error either way."""
    record = request.state.record
    record.model, record.stream, record.prompt_tokens = service.name, found.stream, wanted.prompt_tokens
    exchange = Exchange(service, record, wanted, request.receive)
    try:
        first = await exchange.take()
        if found.stream:
            return EventStream(_events(exchange, first, shape, found.include_usage))
        got = [one async for batch in exchange.all(first) for one in batch]
    except ClientGoneError as error:
        exchange.close(error)
        return Response(status_code=499)  # nobody gets it
    except Exception as error:
        exchange.close(error)
        log_defect(error)
        raise told(error) from error
    except BaseException as error:
        exchange.close(error)
        raise
    exchange.close()
    usage = usage_of(wanted.prompt_tokens, _tokens(exchange, wanted))
    return Response(encode(shape.response(parts_of(got), usage)), media_type="application/json")


async def _events(exchange: Exchange, first: list[Got], shape: Shape, usage: bool) -> AsyncGenerator[bytes, None]:
    """The whole stream. An error ends it with an event that says so."""
    why: BaseException | None = None
    try:
        async for batch in exchange.all(first):
            data = b"".join(_encoded(shape, part) for part in parts_of(batch))
            if data:
                yield data
        if usage:
            tokens = usage_of(exchange.wanted.prompt_tokens, _tokens(exchange, exchange.wanted))
            yield event(shape.usage_chunk(tokens))
        yield DONE
    except ClientGoneError as error:
        why = error
    except Exception as error:  # noqa: BLE001 - the client is told of it, whatever it is
        why = error
        log_defect(error)
        yield event(told(error).body())
    except BaseException as error:
        why = error
        raise
    finally:
        exchange.close(why)


def _encoded(shape: Shape, part: Part) -> bytes:
    return b"".join(event(chunk) for chunk in shape.chunks(part))


def _tokens(exchange: Exchange, wanted: EngineRequest) -> int:
    return exchange.tokens if wanted.max_new_tokens else 0

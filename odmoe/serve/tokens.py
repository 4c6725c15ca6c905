"""Texts to tokens and back: `/tokenize` and `/detokenize` as vLLM has them, and Anthropic's count of a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.routing import Route

from odmoe.serve.anthropic.request import read_counted
from odmoe.serve.api_error import ApiError
from odmoe.serve.computed import ComputedRoute
from odmoe.serve.openai.requests import ChatRequest, to_request
from odmoe.serve.openai.templates import chat_text
from odmoe.serve.request_fields import Body
from scheduler.errors import PromptTooLongError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from odmoe.serve.service import Service

CONTEXTS, LEAST_BOUND = 8, 65_536
"""So many contexts of tokens are counted, and at least so many tokens."""
MOST_TOKEN_CHARACTERS = 16
"""A text with more characters for each of those tokens is refused before it is encoded."""


def add_tokens(app: FastAPI, service: Service) -> None:
    """`/tokenize`, `/detokenize`, `/v1/messages/count_tokens`."""
    routes = {"/tokenize": tokenize, "/detokenize": detokenize, "/v1/messages/count_tokens": count_tokens}
    for path, compute in routes.items():
        app.router.routes.append(Route(path, ComputedRoute(service, compute), methods=["POST"]))


def tokenize(service: Service, given: dict[str, Any]) -> dict[str, Any]:
    """Of a `prompt`, with the tokenizer's special tokens unless `add_special_tokens` is false, or of a chat."""
    given = {"model": service.name, **given}
    is_chat = "messages" in given
    own = Body({name: given.pop(name) for name in ("add_special_tokens", "return_token_strs") if name in given})
    special = own.take("add_special_tokens", bool, not is_chat)
    with_texts = own.take("return_token_strs", bool, False)
    if is_chat:
        request = to_request(ChatRequest, given, service.unknown_fields)
        service.check_name(request.model)
        text = chat_text(service.tokenizer, request)
    else:
        body = Body(given)
        service.check_name(body.need("model", str))
        text = body.need("prompt", str)
        body.end(service.unknown_fields)
    tokens = _encode(service, text, special)
    found = {"count": len(tokens), "max_model_len": service.context, "tokens": tokens}
    return found | {"token_strs": service.tokenizer.convert_ids_to_tokens(tokens) if with_texts else None}


def detokenize(service: Service, given: dict[str, Any]) -> dict[str, Any]:
    """The text of `tokens`, special ones included."""
    body = Body({"model": service.name, **given})
    service.check_name(body.need("model", str))
    tokens = body.need("tokens", list)
    body.end(service.unknown_fields)
    most = len(service.tokenizer)
    wrong = next((one for one in tokens if type(one) is not int or not 0 <= one < most), None)
    if wrong is not None:
        text = f"tokens has {str(wrong)[:80]}; allowed: 0 to {most - 1}, the tokens of this model"
        raise ApiError(400, text, param="tokens", code="invalid_value")
    return {"prompt": service.tokenizer.decode(tokens)}


def count_tokens(service: Service, given: dict[str, Any]) -> dict[str, Any]:
    """Of a request for `/v1/messages`."""
    found = read_counted(given, service.unknown_fields)
    service.check_name(found.request.model)
    if not isinstance(found.request, ChatRequest):
        raise TypeError("a request for a message is a chat")
    with found.own_names():
        text = chat_text(service.tokenizer, found.request)
    return {"input_tokens": len(_encode(service, text, special=False))}


def _encode(service: Service, text: str, special: bool) -> list[int]:
    """More than the context has, too. Raises ApiError for a text far beyond it, which would take memory without end."""
    most = max(LEAST_BOUND, CONTEXTS * service.context)
    if len(text) > MOST_TOKEN_CHARACTERS * most:
        says = f"the text has {len(text)} characters; at most {MOST_TOKEN_CHARACTERS * most} are taken here; split it"
        raise ApiError(400, says, param="prompt", code="invalid_value")
    try:
        return service.model.opened.encode(text, special, most=most + 1)
    except PromptTooLongError as error:
        says = f"the text has more than {most} tokens, the most that are counted here; split it"
        raise ApiError(400, says, param="prompt", code="invalid_value") from error

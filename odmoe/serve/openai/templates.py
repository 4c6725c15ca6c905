"""A request's chat in the model's chat template, with the tools that it offers."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from odmoe import chat
from odmoe.serve.api_error import ApiError
from scheduler.errors import ConfigError

if TYPE_CHECKING:
    from odmoe.serve.openai.requests import ChatRequest


def chat_text(tokenizer: Any, request: ChatRequest) -> str:
    """The chat up to where the answer begins. Raises ApiError where the model has no template, or one that does not
    know what is asked."""
    _check_variables(tokenizer, request.chat_template_kwargs)
    text = _apply_template(tokenizer, request, [])
    if not request.offered_tools:
        return text
    with_tools = _apply_template(tokenizer, request, request.offered_tools)
    if with_tools == text:
        raise ApiError(
            400, "the model's chat template knows no tools; leave them out", param="tools", code="unsupported_parameter"
        )
    return with_tools


def _check_variables(tokenizer: Any, variables: dict[str, Any]) -> None:
    """Raises ApiError for what is no variable: a template of the client's own would run here."""
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in variables:
        if name in parameters:
            raise ApiError(
                400,
                f"chat_template_kwargs.{name} is no variable of the chat template; leave it out",
                param="chat_template_kwargs",
                code="unsupported_parameter",
            )


def _apply_template(tokenizer: Any, request: ChatRequest, tools: list[dict[str, Any]]) -> str:
    try:
        return chat.chat_text(
            tokenizer,
            request.messages,
            tools,
            request.chat_template_kwargs,
            request.add_generation_prompt,
            request.continue_final_message,
        )
    except ConfigError as error:
        code = "invalid_value" if getattr(tokenizer, "chat_template", None) else "no_chat_template"
        raise ApiError(400, str(error), param="messages", code=code) from error

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
    """The chat up to where the answer begins, with the tools that are offered, and with marks (`odmoe.chat`). Raises
    ApiError if the model has no template, or one that refuses the chat."""
    _check_variables(tokenizer, request.chat_template_kwargs)
    return _apply_template(tokenizer, request, request.offered_tools)


def _variables(request: ChatRequest) -> dict[str, Any]:
    """Of the template. `reasoning_effort` is gpt-oss's name; what others know is whether to think at all, under the
    names of Qwen3 and GLM, and of DeepSeek-V3.1."""
    if request.reasoning_effort is None:
        return request.chat_template_kwargs
    found: dict[str, Any] = {"reasoning_effort": request.reasoning_effort}
    if request.reasoning_effort == "none":
        found |= {"enable_thinking": False, "thinking": False}
    return found | request.chat_template_kwargs


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
            _variables(request),
            request.add_generation_prompt,
            request.continue_final_message,
        )
    except ConfigError as error:
        code = "invalid_value" if getattr(tokenizer, "chat_template", None) else "no_chat_template"
        raise ApiError(400, str(error), param="messages", code=code) from error

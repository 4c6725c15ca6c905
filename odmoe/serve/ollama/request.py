"""Requests of ollama's `/api/chat` and `/api/generate`: https://github.com/ollama/ollama/blob/main/docs/api.md."""

from __future__ import annotations

import json
from typing import Any

from odmoe.serve.anthropic.request import THINKS
from odmoe.serve.ollama.events import Lines, Preload
from odmoe.serve.openai.neutral import ALL_TOKENS
from odmoe.serve.openai.requests import ChatRequest, CompletionRequest
from odmoe.serve.request_fields import Body, UnknownFields, objects_in
from odmoe.serve.translated import Translated, system_messages, to_translated

LATEST = ":latest"
"""The tag that ollama adds to a name without one."""
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "images": ([],),
    "suffix": ("",),
    "template": ("",),
    "context": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
}
"""Fields that are not supported, with the values that ask for nothing."""
UNUSED = ("keep_alive", "truncate", "shift")
"""Fields about how long a model stays in memory, here until the service ends, and about prompts that do not fit, which
are refused."""
OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Of `options` -> fields of a chat."""
UNSUPPORTED_OPTIONS: dict[str, tuple[Any, ...]] = {"mirostat": (0,), "tfs_z": (1,), "typical_p": (1,)}
UNUSED_OPTIONS = (
    "num_ctx",
    "num_keep",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "numa",
    "low_vram",
    "vocab_only",
    "use_mmap",
    "use_mlock",
    "repeat_last_n",
    "mirostat_eta",
    "mirostat_tau",
    "penalize_newline",
    "f16_kv",
)
"""About how ollama runs a model. The context is that of the service; penalties reach over all of it."""
NAMES = {
    "max_tokens": "options.num_predict",
    "response_format": "format",
    "repetition_penalty": "options.repeat_penalty",
}
NAMES |= {name: f"options.{name}" for name in OPTIONS if name == OPTIONS[name]}


def model_name(given: str) -> str:
    """As the service has it."""
    return given.removesuffix(LATEST)


def read_chat(given: dict[str, Any], fields: UnknownFields) -> Translated | Preload:
    """Raises ApiError."""
    body = Body(given)
    named, chat = _begin(body, fields)
    calls: list[dict[str, Any]] = []
    chat["messages"] = [
        _message(Body(message, place), calls, fields)
        for place, message in objects_in(body.take("messages", list, []), "messages")
    ]
    chat["tools"] = body.take("tools", list, [])
    _end(body, fields)
    if not chat["messages"]:
        return Preload(named, is_chat=True)
    return to_translated(ChatRequest, chat, fields, lambda head: Lines(head, is_chat=True), named, NAMES)


def read_generate(given: dict[str, Any], fields: UnknownFields) -> Translated | Preload:
    """A chat of one message; with `raw` a prompt as it is. Raises ApiError."""
    body = Body(given)
    named, asked = _begin(body, fields)
    prompt, system = body.take("prompt", str, ""), body.take("system", str, "")
    is_raw = body.take("raw", bool, False)
    _end(body, fields)
    if not prompt:
        return Preload(named, is_chat=False)
    kind: type[ChatRequest | CompletionRequest] = ChatRequest
    if is_raw:
        kind = CompletionRequest
        asked["prompt"] = prompt
        asked.setdefault("max_tokens", ALL_TOKENS)
        asked.pop("chat_template_kwargs", None)
        asked.pop("reasoning_effort", None)
    else:
        asked["messages"] = [*system_messages(system), {"role": "user", "content": prompt}]
    return to_translated(kind, asked, fields, lambda head: Lines(head, is_chat=False), named, NAMES)


def _begin(body: Body, fields: UnknownFields) -> tuple[str, dict[str, Any]]:
    """The model as the client names it, and what both routes have."""
    named = body.need("model", str)
    found: dict[str, Any] = {"model": model_name(named), "stream": body.take("stream", bool, True)}
    found["response_format"] = _format(body)
    found |= _thinking(body)
    options = Body(body.take("options", dict, {}), "options")
    for theirs, ours in OPTIONS.items():
        found[ours] = options.take_any(theirs)
    most = options.take("num_predict", int, -1)
    if most > 0:
        found["max_tokens"] = most
    options.refuse(UNSUPPORTED_OPTIONS)
    options.skip(*UNUSED_OPTIONS)
    options.end(fields)
    return named, found


def _end(body: Body, fields: UnknownFields) -> None:
    body.refuse(UNSUPPORTED)
    body.skip(*UNUSED)
    body.end(fields)


def _format(body: Body) -> dict[str, Any] | None:
    given = body.take_any("format")
    if given in (None, "", {}):
        return None
    if given == "json":
        return {"type": "json_object"}
    if isinstance(given, dict):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given}}
    raise body.invalid("format", "is neither json nor a JSON schema")


def _thinking(body: Body) -> dict[str, Any]:
    given = body.take_any("think")
    if given is None:
        return {}
    if isinstance(given, bool):
        return {"chat_template_kwargs": THINKS} if given else {"reasoning_effort": "none"}
    return {"reasoning_effort": given}


def _message(body: Body, calls: list[dict[str, Any]], fields: UnknownFields) -> dict[str, Any]:
    """`calls`: of the messages before that have no result yet; ollama has no ids of them."""
    role = body.need("role", str)
    message: dict[str, Any] = {"role": role, "content": body.take("content", str, "")}
    thinking = body.take("thinking", str, "")
    if thinking:
        message["reasoning_content"] = thinking
    body.refuse({"images": ([],)})
    for place, call in objects_in(body.take("tool_calls", list, []), body.name_of("tool_calls")):
        message.setdefault("tool_calls", []).append(_call(Body(call, place), len(calls)))
        calls.append(message["tool_calls"][-1])
    if role == "tool":
        name = body.take("tool_name", str, body.take("name", str, ""))
        found = next((one for one in calls if one["function"]["name"] == name), calls[0] if calls else None)
        message["tool_call_id"] = body.take("tool_call_id", str, found["id"] if found else "call_0")
        if name:
            message["name"] = name
        if found:
            calls.remove(found)
    body.end(fields)
    return message


def _call(body: Body, number: int) -> dict[str, Any]:
    function = Body(body.need("function", dict), body.name_of("function"))
    arguments = json.dumps(function.take("arguments", dict, {}), ensure_ascii=False)
    return {
        "id": body.take("id", str, f"call_{number}"),
        "type": "function",
        "function": {"name": function.need("name", str), "arguments": arguments},
    }

"""A request as the OpenAI API takes it."""

from __future__ import annotations

import json
from typing import Any

from odmoe.api.asking import Asked, Options
from odmoe.api.options import schema_text
from odmoe.settings.settings import Settings
from odmoe.settings.table import declared
from scheduler.errors import ConfigError

_SAME = (
    *("temperature", "top_p", "top_k", "seed", "ignore_eos", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty"),
)
"""Options that the API has by the same name, or `odmoe serve` has beside it."""
_UNSERVED = {"sample": "give temperature, top_p or top_k", "prompt_logprobs": "use the API's echo, or odmoe.load"}
"""Options of a loaded model alone, and what to do instead."""


def request_of(asked: Asked, model: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a request. Raises ConfigError."""
    options: Any = {name: value for name, value in asked.options.items() if value is not None}
    for name, instead in _UNSERVED.items():
        if name in options:
            raise ConfigError(f"{name} is given, which a served model does not have; {instead}")
    chat = asked.messages is not None
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if chat:
        body["messages"] = [dict(one) for one in asked.messages or ()]
    else:
        body["prompt"] = asked.prompt if isinstance(asked.prompt, str) else list(asked.prompt or ())
    body["max_completion_tokens" if chat else "max_tokens"] = options.get(
        "max_new_tokens", declared(Settings, "max_new_tokens").default
    )
    body |= {name: options[name] for name in _SAME if name in options}
    if "stop" in options:
        stop = options["stop"]
        body["stop"] = stop if isinstance(stop, str) else list(stop)
    if "logit_bias" in options:
        body["logit_bias"] = {str(token): bias for token, bias in options["logit_bias"].items()}
    body |= _logprobs(options, chat)
    schema = schema_text(options.get("schema"))
    if schema is not None:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": _parsed(schema)},
        }
    return f"/v1/{'chat/' if chat else ''}completions", body


def _logprobs(options: Options, chat: bool) -> dict[str, Any]:
    count = options.get("logprobs")
    if count is None:
        return {}
    return {"logprobs": True, "top_logprobs": count} if chat else {"logprobs": count}


def _parsed(schema: str) -> Any:
    try:
        return json.loads(schema)
    except ValueError as error:
        raise ConfigError(f"schema is not valid JSON ({error}); give a dict") from error

"""A request as the OpenAI API takes it."""

from __future__ import annotations

import json
from typing import Any

from odmoe.api.asking import Query
from odmoe.api.options import Options
from scheduler.errors import ConfigError, PromptError

_SAME = (
    *("temperature", "top_p", "top_k", "seed", "ignore_eos", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty"),
)
"""Options that the API has by the same name, or `odmoe serve` has beside it."""
_UNSERVED = {"sample": "give temperature, top_p or top_k", "prompt_logprobs": "use the API's echo, or odmoe.load"}
"""Options of a loaded model alone, and what to do instead."""


def request_of(query: Query, model: str) -> tuple[str, bytes]:
    """Path and body of a request. Raises ConfigError, PromptError."""
    options: Any = {name: value for name, value in query.options.items() if value is not None}
    for name, instead in _UNSERVED.items():
        if name in options:
            raise ConfigError(f"{name} is given, which a served model does not have; {instead}")
    chat = query.messages is not None
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    body["messages" if chat else "prompt"] = query.messages if chat else query.prompt
    if "max_new_tokens" in options:
        body["max_completion_tokens" if chat else "max_tokens"] = options["max_new_tokens"]
    body |= {name: options[name] for name in _SAME if name in options}
    if options.get("stop"):
        body["stop"] = list(options["stop"])
    if options.get("stop_token_ids"):
        body["stop_token_ids"] = list(options["stop_token_ids"])
    if "logit_bias" in options:
        body["logit_bias"] = {str(token): bias for token, bias in options["logit_bias"].items()}
    body |= _logprobs(options, chat)
    if "schema" in options:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": _parsed(options["schema"])},
        }
    return f"/v1/{'chat/' if chat else ''}completions", _encoded(body)


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


def _encoded(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt is not UTF-8 text ({error.reason}); convert it") from error
    except ValueError as error:
        raise ConfigError(f"the messages or the schema have a number that is none ({error}); give another") from error

"""What clients send that asks for nothing, and what asks for something that there is not here."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from odmoe.chat import FIELDS
from odmoe.serve.request_fields import Body, UnknownFields

UNUSED = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "store",
    "service_tier",
    "cache_prompt",
    "priority",
    "request_id",
)
"""Fields that identify a request to its sender, or say how it is kept or queued elsewhere. They change no answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "modalities": (["text"], []),
    "parallel_tool_calls": (True,),
    "audio": (),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    # Of other servers. To ignore these would be to answer something else than was asked.
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "grammar": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json": ({}, ""),
    "guided_regex": ("",),
    "json_schema": ({},),
    "structured_outputs": ({},),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "num_beams": (1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (0, False),
    "prompt_embeds": ([],),
    "skip_special_tokens": (True,),
    "documents": ([],),
    "chat_template": (),
}
"""Fields that are not supported, with the values that ask for nothing."""
OFF: dict[str, tuple[Any, ...]] = {
    "seed": (-1,),
    "top_k": (-1,),
    "min_p": (0,),
    "max_tokens": (-1,),
    "max_completion_tokens": (-1,),
    "stop": ("", []),
    "tool_choice": ("",),
}
"""Of fields that are supported: values by which clients say that they ask for nothing."""
ALL_TOKENS = 1 << 20
"""`max_tokens` of a completion that goes on to the end of the context."""
UNFOLLOWED = ("audio", "function_call")
"""Fields of a message that cannot be left out: they are a part of what it says."""


def plain_fields(given: dict[str, Any], known: Collection[str], strict: bool) -> dict[str, Any]:
    """The fields of a request without those that ask for nothing. Raises ApiError for what is not supported.

    `known`: the fields that are read. `strict`: values that only other servers take for nothing are left as they are.
    """
    body = Body({name: value for name, value in given.items() if name not in UNUSED or name in known})
    body.refuse({name: values for name, values in NEUTRAL.items() if name not in known})
    given = body.left
    if strict:
        return given
    if given.get("max_tokens") == -1 and "prompt" in known:
        given["max_tokens"] = ALL_TOKENS
    if isinstance(given.get("stop"), list):
        given["stop"] = [text for text in given["stop"] if text != ""]
    for name, values in OFF.items():
        if name in given and any(given[name] == value and type(given[name]) is not bool for value in values):
            del given[name]
    if "repeat_penalty" in given:
        given.setdefault("repetition_penalty", given["repeat_penalty"])
        del given["repeat_penalty"]
    if given.get("top_logprobs") == 0 and not given.get("logprobs"):
        del given["top_logprobs"]
    if "stream_options" in given and not given.get("stream"):
        del given["stream_options"]
    if given.get("max_tokens") == given.get("max_completion_tokens") and "max_completion_tokens" in given:
        del given["max_tokens"]
    if given.get("continue_final_message") is True:
        given.setdefault("add_generation_prompt", False)
    return given


def plain_messages(messages: list[Any], fields: UnknownFields) -> list[Any]:
    """A chat's messages as templates know them: without fields that nobody here reads, of which answers of other
    servers have some that clients send back. Raises ApiError for those with --strict."""
    if fields.strict:
        given = [one for one in messages if isinstance(one, dict)]
        for name in (name for one in given for name in one if name not in FIELDS and one[name] is not None):
            fields.on_unknown(f"messages.{name}", FIELDS)
        return messages
    return [_plain_message(one, fields) if isinstance(one, dict) else one for one in messages]


def _plain_message(given: dict[str, Any], fields: UnknownFields) -> dict[str, Any]:
    message = {name: value for name, value in given.items() if name in FIELDS or (name in UNFOLLOWED and value)}
    for name in given.keys() - message.keys() - set(UNFOLLOWED):
        if name == "reasoning" and isinstance(given[name], str):  # as several servers call it
            message.setdefault("reasoning_content", given[name])
        elif given[name] not in (None, [], {}, ""):
            fields.on_unknown(f"messages.{name}", FIELDS)
    if message.get("content") is None and message.get("role") in ("assistant", "tool"):
        message["content"] = ""
    if message.get("tool_calls") == []:
        del message["tool_calls"]
    return message

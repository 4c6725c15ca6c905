"""Answers in families' forms, read by the parsers of `odmoe/response_parsing/`."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from odmoe.response_parsing.forms import find_form
from odmoe.response_parsing.parsers import join_deltas, make_parser, merge_deltas
from support.chats.families import FAMILIES, TOOLS

SCHEMA = {
    "type": "object",
    "properties": {"count": {"enum": [1, 20, 300]}, "kind": {"enum": ["a", "b"]}},
    "required": ["count", "kind"],
    "additionalProperties": False,
}
"""A short object: small models end it."""


@cache
def tokenizer_of(template: str) -> Any:
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(unk_token="?")))
    made.chat_template = template
    return made


def read(family: str, prompt: str, parts: list[str], piecewise: bool, cut: bool = False, **how: Any) -> Any:
    form = find_form(tokenizer_of(FAMILIES[family].template))
    parser = make_parser(form, prompt, how.pop("tools", TOOLS), piecewise=piecewise, **how)
    deltas = [delta for part in parts for delta in parser.push(part)] + parser.finish(cut)
    assert merge_deltas(join_deltas(deltas)) == merge_deltas(deltas)
    return merge_deltas(deltas)


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Without ids."""
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls}

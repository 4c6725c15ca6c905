"""Answers that are tool calls, or else follow a JSON schema: as a grammar of llguidance."""

from __future__ import annotations

import json
from typing import Any

from odmoe.json_schema import LARK, with_whitespace
from odmoe.response_parsing.forms import Form


def call_or_format(form: Form, prompt: str, schema: str, tokenizer: Any) -> str | None:
    """The grammar of an answer that first may think, and then is a call or follows the schema. None: it cannot be
    guided, since special tokens mark calls. `prompt`: the chat's text. `schema`: JSON."""
    if not form.reads_calls:
        return schema
    if form.calls is None or any(mark in tokenizer.all_special_tokens for mark in _marks(form)):
        return None
    opens = [form.calls.open, *form.calls.wrappers[:1]]
    rules = [
        f"{LARK} {{}}",
        f"start: {_think(form, prompt)} (answer | call)",
        r"BLANKS: /\s*/",
        f"call: ({' | '.join(json.dumps(one) for one in opens)}) REST",
        r"REST: /(.|\n)*/",
        f"answer: %json {json.dumps(with_whitespace(json.loads(schema)))}",
    ]
    if form.think is not None:
        opened = "" if _is_begun(form, prompt) else _escaped(form.think[0])
        rules.append(rf"think[lazy]: /{opened}(.|\n)*{_escaped(form.think[1])}/")
    return "\n".join(rules)


def _marks(form: Form) -> list[str]:
    calls = [form.calls.open, form.calls.close or "", *form.calls.wrappers] if form.calls is not None else []
    return [*(form.think or ()), *calls]


def _think(form: Form, prompt: str) -> str:
    if form.think is None:
        return "BLANKS"
    return "think BLANKS" if _is_begun(form, prompt) else "BLANKS (think BLANKS)?"


def _is_begun(form: Form, prompt: str) -> bool:
    return form.think is not None and prompt.rstrip().endswith(form.think[0])


def _escaped(mark: str) -> str:
    """For a regular expression between slashes."""
    return "".join(char if char.isalnum() or char in "<>" else f"\\{char}" for char in mark)

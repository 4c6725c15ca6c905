"""How each family writes its reasoning and its tool calls."""

# ruff: noqa: RUF001 - DeepSeek's tokens have wide bars

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from odmoe.response_parsing.calls import CallReader
from odmoe.response_parsing.header_calls import HeaderCall, HeaderOrJson
from odmoe.response_parsing.json_calls import JsonCalls
from odmoe.response_parsing.xml_calls import Tags, TypedValue, XmlCall

THINK = ("<think>", "</think>")
"""DeepSeek-R1 and V3.1, Qwen3, GLM-4.5, Kimi-K2-Thinking, MiniMax-M2."""
MISTRAL_THINK = ("[THINK]", "[/THINK]")

_READ = Callable[[TypedValue], CallReader]


@dataclass(frozen=True, slots=True)
class CallForm:
    """How tool calls are written."""

    name: str
    marks: tuple[str, ...]
    """Of the chat template's text: a template that has them all writes calls so."""
    open: str
    """Before a call, or a list of calls."""
    close: str | None
    """None: the answer's end, or the next call."""
    read: _READ
    wrappers: tuple[str, ...] = ()
    """Around all calls, and no part of the text."""
    inner: tuple[str, ...] = ()
    """Within a call, if they may be special tokens."""
    is_json: bool = False
    """What stands between `open` and `close` is JSON with name and arguments."""
    header: str | None = None
    """Up to a call's arguments, with `{name}`; None: no JSON arguments follow a header."""
    id_length: int | None = None
    """Of a call's id if the template allows one length only."""


def _json(typed: TypedValue) -> CallReader:
    return JsonCalls()


def _header(pattern: str) -> _READ:
    return lambda typed: HeaderCall(re.compile(pattern))


def _header_or_json(pattern: str) -> _READ:
    return lambda typed: HeaderOrJson(re.compile(pattern))


def _xml(name: str, parameter: str, begin: str) -> _READ:
    return partial(XmlCall, Tags(re.compile(name), re.compile(parameter, re.DOTALL), begin))


_SEP = "<｜tool▁sep｜>"
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_READ = _header(rf"\s*(?:function{_SEP})?(?P<name>[^\s<]+)(?:{_SEP}|\n```json)\s*")

CALL_FORMS = (
    CallForm(
        "Mistral",
        ("[TOOL_CALLS]",),
        "[TOOL_CALLS]",
        None,
        _header_or_json(r"(?P<name>[\w.-]+)\s*(?:\[CALL_ID\](?P<id>\w+))?\s*(?:\[ARGS\])?\s*"),
        inner=("[ARGS]", "[CALL_ID]"),
        id_length=9,
    ),
    CallForm(
        "DeepSeek-V3 and R1",
        (_SEP, "```json"),
        _DEEPSEEK_CALL[0],
        _DEEPSEEK_CALL[1],
        _DEEPSEEK_READ,
        _DEEPSEEK,
        (_SEP,),
        header=_DEEPSEEK[0] + _DEEPSEEK_CALL[0] + f"function{_SEP}{{name}}\n```json\n",
    ),
    CallForm(
        "DeepSeek-V3.1",
        (_SEP,),
        _DEEPSEEK_CALL[0],
        _DEEPSEEK_CALL[1],
        _DEEPSEEK_READ,
        _DEEPSEEK,
        (_SEP,),
        header=_DEEPSEEK[0] + _DEEPSEEK_CALL[0] + f"{{name}}{_SEP}",
    ),
    CallForm(
        "Kimi-K2",
        ("<|tool_call_argument_begin|>",),
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        _header(r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*"),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<|tool_call_argument_begin|>",),
        header="<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
    ),
    CallForm(
        "MiniMax-M2",
        ("<minimax:tool_call>",),
        "<invoke name=",
        "</invoke>",
        _xml(
            r"""["']?(?P<name>[^"'>\n]+)["']?>""",
            r"""<parameter name=["']?(?P<key>[^"'>\n]+)["']?>\n?(?P<value>.*?)\n?</parameter>""",
            "<parameter",
        ),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    CallForm("MiniMax-M1, Hunyuan", ("<tool_calls>",), "<tool_calls>", "</tool_calls>", _json, is_json=True),
    CallForm(
        "Qwen3-Coder",
        ("<tool_call>", "<function="),
        "<tool_call>",
        "</tool_call>",
        _xml(
            r"\s*<function=(?P<name>[^>\n]+)>",
            r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
            "<parameter=",
        ),
    ),
    CallForm(
        "GLM-4.5",
        ("<tool_call>", "<arg_key>"),
        "<tool_call>",
        "</tool_call>",
        _xml(
            r"\s*(?P<name>[\w.:-]+)(?=\n|<)",
            r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
            "<arg_key>",
        ),
        inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    CallForm("Hermes, Qwen2.5 and Qwen3", ("<tool_call>",), "<tool_call>", "</tool_call>", _json, is_json=True),
    CallForm("Granite 3", ("<|tool_call|>",), "<|tool_call|>", None, _json, is_json=True),
)
"""The first whose marks a chat template has is the model's."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a model writes its answers."""

    think: tuple[str, str] | None = None
    """The marks around its reasoning."""
    calls: CallForm | None = None
    is_harmony: bool = False
    """Messages in channels (gpt-oss)."""
    own: Any = None
    """The tokenizer's own response template."""

    @property
    def reads_calls(self) -> bool:
        return self.own is not None or self.is_harmony or self.calls is not None

    @property
    def is_plain(self) -> bool:
        """An answer is text, and nothing else."""
        return not self.reads_calls and self.think is None

    def without_calls(self) -> Form:
        """For a request that offers no tools: what looks like a call is text."""
        return replace(self, calls=None)

    def has_mark(self, text: str) -> bool:
        """Whether a special token's text stands in a mark: other special tokens are no part of an answer."""
        if self.own is not None:
            return bool(text) and any(text in one or re.escape(text) in one for one in _texts_of(self.own))
        if self.is_harmony:
            return text in HARMONY_MARKS
        marks = list(self.think or ())
        if self.calls is not None:
            marks += [self.calls.open, self.calls.close or "", *self.calls.wrappers, *self.calls.inner]
        return text in marks


GEMMA: dict[str, Any] = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "content": {},
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>[\w.-]+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"name": "{name}", "arguments": "{content}"},
        },
    },
}
"""Gemma 4's response template, which few of its tokenizers declare."""
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")


def _texts_of(value: Any) -> Iterator[str]:
    """All texts within a response template."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts_of(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts_of(one)


def find_form(tokenizer: Any) -> Form:
    """By the tokenizer's response template, or else the text of its chat template and its vocabulary."""
    own = getattr(tokenizer, "response_template", None)
    if own is not None:
        return Form(own=own)
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if "<|channel|>" in template and "<|message|>" in template:
        return Form(is_harmony=True)
    if "<|tool_call>call:" in template:
        return Form(own=GEMMA)
    added = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    think = next((pair for pair in (THINK, MISTRAL_THINK) if pair[1] in template or pair[0] in added), None)
    return Form(think, next((one for one in CALL_FORMS if all(mark in template for mark in one.marks)), None))


def marking_tokens(tokenizer: Any, form: Form) -> frozenset[int]:
    """Special tokens that mark something in answers of this form."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(token for token, one in added if one.special and form.has_mark(one.content.strip()))

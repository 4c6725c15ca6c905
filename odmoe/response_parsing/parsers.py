"""Parses answers into reasoning, content and tool calls while they come, by Transformers' parser of responses."""

from __future__ import annotations

import re
from typing import Any

from odmoe.response_parsing.answer_parser import AnswerParser, CallRegion, Delta, Writer
from odmoe.response_parsing.calls import CallReader
from odmoe.response_parsing.forced import ForcedCall
from odmoe.response_parsing.forms import CallForm, Form
from odmoe.response_parsing.header_calls import NamedCall
from odmoe.response_parsing.json_calls import JsonCalls, call_of
from odmoe.response_parsing.xml_calls import typed_by

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of response templates."""


class PlainParser:
    """All is content."""

    def push(self, text: str) -> list[Delta]:
        return [{"content": text}] if text else []

    def finish(self, cut: bool) -> list[Delta]:
        return []


class ForcedParser:
    """The answer is a call that was begun in the prompt, and follows a schema."""

    def __init__(self, writer: Writer, piecewise: bool, name: str | None) -> None:
        """`name`: of the tool whose arguments the answer is. None: it is a call as JSON."""
        reader: CallReader = JsonCalls() if name is None else NamedCall(name)
        self._region = CallRegion(reader, "", writer, piecewise)

    def push(self, text: str) -> list[Delta]:
        return self._region.push(text)

    def finish(self, cut: bool) -> list[Delta]:
        return self._region.end(not cut)


class FormParser:
    """Reasoning at the beginning, content, and calls between marks."""

    def __init__(self, form: Form, begun: str, tools: list[dict[str, Any]], writer: Writer, piecewise: bool) -> None:
        """`begun`: what the prompt has of the answer already."""
        from transformers.utils.chat_parsing import ResponseParser

        self._form, self._writer, self._piecewise = form, writer, piecewise
        self._typed = typed_by(tools)
        self._parser = ResponseParser(_template_of(form), prefix=begun)
        self._region: CallRegion | None = None
        if begun:
            writer.begin_region()

    def push(self, text: str) -> list[Delta]:
        return self._read(self._parser.feed(text), True)

    def finish(self, cut: bool) -> list[Delta]:
        _, events = self._parser.finalize()
        return self._read(events, not cut, "") + self._writer.end()

    def _read(self, events: list[dict[str, Any]], closed: bool, mark: str | None = None) -> list[Delta]:
        found: list[Delta] = []
        for event in events:
            field, kind = event["field"], event["type"]
            if field == "tool_calls":
                found += self._read_call(event, closed, mark)
            elif kind == "region_chunk" and field != "wrapper":
                found += self._writer.text(field, event["text"])
            elif kind == "region_close" and field == "reasoning_content":
                self._writer.begin_region()
        return found

    def _read_call(self, event: dict[str, Any], closed: bool, mark: str | None) -> list[Delta]:
        calls = self._form.calls
        if calls is not None and event["type"] == "region_open":
            self._region = CallRegion(calls.read(self._typed), calls.open, self._writer, self._piecewise)
        if calls is None or self._region is None:
            return []
        if event["type"] == "region_chunk":
            return self._region.push(event["text"])
        if event["type"] == "region_close":
            return self._region.end(closed, (calls.close or "") if mark is None else mark)
        return []


def _template_of(form: Form) -> dict[str, Any]:
    """A response template. Values are of no interest: events are read as they come."""
    fields: dict[str, Any] = {"content": {}}
    if form.think is not None:
        opened, closed = form.think
        fields["reasoning_content"] = {"open_pattern": rf"\A\s*{re.escape(opened)}", "close": closed}
    calls = form.calls
    if calls is not None:
        fields["tool_calls"] = {"open": calls.open, "repeats": True, **_close_of(calls)}
        if calls.wrappers:
            fields["wrapper"] = {"open": list(calls.wrappers), "close_pattern": "", "repeats": True}
    return {"start_anchor_pattern": r"\A", "fields": fields}


def _close_of(calls: CallForm) -> dict[str, Any]:
    if calls.close is not None:
        return {"close": calls.close}
    return {"close_pattern": f"(?={re.escape(calls.open)})"}


_HEADER = re.compile(r"\s*(<|to=|to?\Z|\Z)")
"""How the header of a channel begins."""
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class HarmonyParser:
    """Messages in channels (gpt-oss, https://developers.openai.com/cookbook/articles/openai-harmony): analysis is
    reasoning, a message to a function is a call, and everything else content."""

    def __init__(self, reads_calls: bool, writer: Writer, piecewise: bool) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        fields = {
            "header": {},
            "message": {"open": "<|message|>", "close": ["<|end|>", "<|return|>", "<|call|>"], "repeats": True},
        }
        self._parser = ResponseParser({"start_anchor_pattern": r"\A", "fields": fields}, prefix="")
        self._reads_calls, self._writer, self._piecewise = reads_calls, writer, piecewise
        self._header = ""
        self._field = "content"
        self._region: CallRegion | None = None

    def push(self, text: str) -> list[Delta]:
        return self._read(self._parser.feed(text), True)

    def finish(self, cut: bool) -> list[Delta]:
        _, events = self._parser.finalize()
        found = self._read(events, not cut)
        if self._header.lstrip()[:1] != "<":
            found += self._writer.text("content", self._header)
        return found + self._writer.end()

    def _read(self, events: list[dict[str, Any]], closed: bool) -> list[Delta]:
        found: list[Delta] = []
        for event in events:
            field, kind, text = event["field"], event["type"], event.get("text", "")
            if field == "header":
                found += self._read_header(text)
            elif kind == "region_open":
                self._begin()
            elif kind == "region_close":
                found += self._end(closed)
            elif self._region is not None:
                found += self._region.push(text)
            else:
                found += self._writer.text(self._field, text)
        return found

    def _read_header(self, text: str) -> list[Delta]:
        self._header += text
        if _HEADER.match(self._header):
            return []
        text, self._header = self._header, ""
        return self._writer.text("content", text)

    def _begin(self) -> None:
        channel, recipient = _CHANNEL.search(self._header), _RECIPIENT.search(self._header)
        self._header = ""
        is_analysis = channel is not None and channel[1] == "analysis"
        if recipient is not None and self._reads_calls:
            self._region = CallRegion(NamedCall(recipient[1]), "", self._writer, self._piecewise)
        self._field = "reasoning_content" if is_analysis else "content"

    def _end(self, closed: bool) -> list[Delta]:
        region, self._region = self._region, None
        if region is not None:
            return region.end(closed)
        if self._field == "reasoning_content":
            self._writer.begin_region()
        return []


class OwnParser:
    """By the tokenizer's own response template. Calls are given one by one, each when it is whole."""

    def __init__(self, template: Any, prompt: str, tools: list[dict[str, Any]], writer: Writer) -> None:
        """`tools`: those that may be called; without one, calls are text."""
        from transformers.utils.chat_parsing import ResponseParser

        self._parser = ResponseParser(template, prefix=prompt, tools=tools)
        self._reads_calls, self._writer = bool(tools), writer
        self._raw = ""
        """What came and was neither given nor read as a call."""
        self._has_failed = False

    def push(self, text: str) -> list[Delta]:
        self._raw += text
        if self._has_failed:
            return self._as_text()
        try:
            return self._read(self._parser.feed(text))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return self._fail()

    def finish(self, cut: bool) -> list[Delta]:
        if self._has_failed:
            return self._writer.end()
        try:
            _, events = self._parser.finalize()
            return self._read(events) + self._writer.end()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return self._fail() + self._writer.end()

    def _read(self, events: list[dict[str, Any]]) -> list[Delta]:
        found: list[Delta] = []
        for event in events:
            field, kind, text = event["field"], event["type"], event.get("text", "")
            if field == "content" and kind == "region_chunk":
                found += self._writer.text("content", text)
                self._forget(text)
            elif field in _REASONING:
                found += self._writer.text("reasoning_content", text)
                self._forget(text)
                if kind == "region_close":
                    self._writer.begin_region()
            elif field == "tool_calls" and kind == "region_close":
                found += self._calls(event["value"])
        return found

    def _forget(self, text: str) -> None:
        """It was given."""
        if text:
            self._raw = self._raw[self._raw.find(text) + len(text) :]

    def _calls(self, value: Any) -> list[Delta]:
        given = value if isinstance(value, list) else [value]
        calls = [call_of(one) if isinstance(one, dict) else None for one in given]
        pieces = [call for call in calls if call is not None]
        if not self._reads_calls or len(pieces) < len(calls):
            return self._as_text()
        self._raw = ""
        self._writer.begin_region()
        return self._writer.call(pieces)

    def _fail(self) -> list[Delta]:
        self._has_failed = True
        return self._as_text()

    def _as_text(self) -> list[Delta]:
        raw, self._raw = self._raw, ""
        return self._writer.text("content", raw)


def make_parser(
    form: Form,
    prompt: str,
    tools: list[dict[str, Any]],
    parallel: bool = True,
    piecewise: bool = False,
    forced: ForcedCall | None = None,
    continued: bool = False,
) -> AnswerParser:
    """`prompt`: the chat's text, whose end may have the beginning of the answer; `continued`: it ends within a message.
    `tools`: those that may be called. `parallel`: several calls may be given. `piecewise`: a call is given as it comes.
    `forced`: the answer is this."""
    writer = Writer(parallel, form.calls.id_length if form.calls is not None else None)
    if forced is not None:
        return ForcedParser(writer, piecewise, forced.name)
    if not tools:
        form = form.without_calls()
    if form.own is not None:
        return OwnParser(form.own, prompt, tools, writer)
    if form.is_harmony:
        return HarmonyParser(bool(tools), writer, piecewise)
    if form.is_plain:
        return PlainParser()
    return FormParser(form, _open_reasoning(form, prompt, continued), tools, writer, piecewise)


def _open_reasoning(form: Form, prompt: str, continued: bool) -> str:
    """Reasoning that the prompt has begun for the model."""
    if form.think is None:
        return ""
    opened, closed = form.think
    is_open = prompt.rstrip().endswith(opened) or (continued and prompt.rfind(opened) > prompt.rfind(closed))
    return opened if is_open else ""


def join_deltas(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of the same field as one."""
    found: list[Delta] = []
    for delta in deltas:
        (field,) = delta
        if found and field != "tool_calls" and field in found[-1]:
            found[-1] = {field: found[-1][field] + delta[field]}
        else:
            found.append(delta)
    return found


def merge_deltas(deltas: list[Delta]) -> dict[str, Any]:
    """The message that deltas make: `content`, `reasoning_content` and `tool_calls`, if there are any."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for field in ("content", "reasoning_content"):
            if field in delta:
                message[field] = message.get(field, "") + delta[field]
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(calls):
                calls.append({"id": piece["id"], "type": "function", "function": dict(piece["function"])})
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return message | ({"tool_calls": calls} if calls else {})

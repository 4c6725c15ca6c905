"""/v1/chat/completions: how its requests are read and its responses written."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from odmoe.response_parsing.call_or_format import call_or_format
from odmoe.response_parsing.forced import ForcedCall, forced_call
from odmoe.response_parsing.forms import find_form, marking_tokens
from odmoe.response_parsing.parsers import make_parser, merge_deltas
from odmoe.serve.openai import logprobs
from odmoe.serve.openai.answer_reader import AnswerReader
from odmoe.serve.openai.engine_request import EngineRequest, options_from_request
from odmoe.serve.openai.parts import Part
from odmoe.serve.openai.templates import chat_text
from odmoe.text import StoppedText, without_marks

if TYPE_CHECKING:
    from odmoe.serve.openai.requests import ChatRequest
    from odmoe.serve.service import Service


def to_engine_request(service: Service, request: ChatRequest) -> tuple[EngineRequest, str]:
    """The request for the engine, and the chat's text. In a thread: it encodes the chat. Raises PromptError,
    ApiError."""
    how = options_from_request(service, request)
    if request.logprobs:
        how["logprobs"] = request.top_logprobs or 0
    text = chat_text(service.tokenizer, request)
    forced = _forced(service, request, without_marks(text))
    if forced is None and request.offered_tools:
        _tell_unreadable(service)
    if forced is not None:
        how["schema"] = forced.schema
    elif request.offered_tools and "schema" in how:
        form, schema = find_form(service.tokenizer), str(how.pop("schema"))
        guide = call_or_format(form, without_marks(text), schema, service.tokenizer)
        if guide is not None:
            how["schema"] = guide
    prompt = service.model.opened.encode(text + (forced.opening if forced is not None else ""), special=False)
    most = request.max_completion_tokens or request.max_tokens or service.limits.max_tokens
    found = EngineRequest([prompt], request.n, most or service.context - len(prompt), how)
    found.check_size(service.context)
    return found, without_marks(text)


_told: WeakSet[Service] = WeakSet()
"""Services whose log says that their model's calls cannot be read."""


def _tell_unreadable(service: Service) -> None:
    """Once, in the log."""
    if service in _told or find_form(service.tokenizer).reads_calls:
        return
    _told.add(service)
    service.log_cause(
        "tools are offered, and it is not known how this model writes calls: its tokenizer has no response_template, "
        "and its chat template none of the known forms (docs/serving.md); calls are left in the content"
    )


def _forced(service: Service, request: ChatRequest, text: str) -> ForcedCall | None:
    """`text`: the chat, without marks."""
    if not request.forced_tools:
        return None
    return forced_call(find_form(service.tokenizer), text, request.forced_tools)


class ChatShape:
    """A whole response has whole calls alone; a stream has a call as it comes."""

    def __init__(
        self, service: Service, request: ChatRequest, engine_request: EngineRequest, text: str, record_id: str
    ) -> None:
        """`text`: the chat in the model's template, without marks."""
        self._service, self._request, self._text = service, request, text
        self._stop = engine_request.how.get("stop", ())
        self._prompt = engine_request.prompts[0]
        self._form = find_form(service.tokenizer)
        self._shown = marking_tokens(service.tokenizer, self._form)
        self._forced = _forced(service, request, text)
        self._readers: dict[int, AnswerReader] = {}
        """Of choices that have begun in a stream."""
        self._head = {
            "id": f"chatcmpl-{record_id}",
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }

    def response(self, parts: list[Part], usage: dict[str, Any]) -> dict[str, Any]:
        choices = [self._choice(part) for part in parts]
        return {"object": "chat.completion", **self._head, "choices": choices, "usage": usage}

    def _choice(self, part: Part) -> dict[str, Any]:
        reader = self._reader(piecewise=False)
        found = merge_deltas(reader.push(part))
        content = None if reader.has_calls else ""
        return {
            "index": part.index,
            "message": {"role": "assistant", "content": content, "refusal": None, **found},
            "logprobs": self._logprobs(part),
            "finish_reason": _reason(part, reader),
        }

    def _reader(self, piecewise: bool) -> AnswerReader:
        request = self._request
        parser = make_parser(
            self._form,
            self._text,
            request.offered_tools,
            request.parallel_tool_calls,
            piecewise,
            self._forced,
            request.continue_final_message,
        )
        marked = None
        if self._shown:
            marked = StoppedText(self._service.tokenizer, self._stop, self._prompt, self._shown)
        return AnswerReader(parser, marked)

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        found = []
        reader = self._readers.get(part.index)
        if reader is None:
            reader = self._readers[part.index] = self._reader(piecewise=True)
            found.append(self._chunk(part.index, {"role": "assistant", "content": "", "refusal": None}))
        deltas = reader.push(part)
        entries = self._logprobs(part)
        if entries is not None and not deltas:
            deltas = [{"content": ""}]
        for delta in deltas:
            found.append(self._chunk(part.index, delta, entries))
            entries = None
        if part.finish is not None:
            found.append(self._chunk(part.index, {}, None, _reason(part, reader)))
        return found

    def _logprobs(self, part: Part) -> dict[str, Any] | None:
        if not self._request.logprobs or not part.steps:
            return None
        return logprobs.of_chat(self._service.texts, [step.logprobs for step in part.steps if step.logprobs])

    def _chunk(
        self, index: int, delta: dict[str, Any], entries: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": entries, "finish_reason": reason}
        return self._event([choice])

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._request.include_usage else {}
        return {"object": "chat.completion.chunk", **self._head, "choices": choices, **usage}

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._event([]) | {"usage": usage}


def _reason(part: Part, reader: AnswerReader) -> str | None:
    """An answer that was cut short has a call only as far as it came."""
    return "tool_calls" if reader.has_calls and part.reason == "stop" else part.reason

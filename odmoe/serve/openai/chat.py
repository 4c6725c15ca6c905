"""/v1/chat/completions: how its requests are read and its responses written."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from odmoe.serve.openai import logprobs
from odmoe.serve.openai.engine_request import EngineRequest, options_from_request
from odmoe.serve.openai.parts import Part
from odmoe.serve.openai.templates import chat_text
from odmoe.serve.openai.tool_calls import Message, check_parser, parse_answer
from odmoe.text import continuation

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
    if request.offered_tools:
        check_parser(service.tokenizer)
    prompt = service.model.opened.encode(text, special=False)
    most = request.max_completion_tokens or request.max_tokens or service.limits.max_tokens
    found = EngineRequest([prompt], request.n, most or service.context - len(prompt), how)
    found.check_size(service.context)
    return found, text


class ChatShape:
    """An answer that may have tool calls is parsed when it is whole; its stream has it in one event."""

    def __init__(
        self, service: Service, request: ChatRequest, engine_request: EngineRequest, text: str, record_id: str
    ) -> None:
        """`text`: the chat in the model's template."""
        self._service, self._request, self._text = service, request, text
        self._prompt = engine_request.prompts[0]
        self._whole: dict[int, Part] = {}
        """What there is of answers that may have tool calls."""
        self._begun: set[int] = set()
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
        parsed = self._parse(part)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        if parsed.calls:
            message["tool_calls"] = parsed.calls
        return {
            "index": part.index,
            "message": message,
            "logprobs": self._logprobs(part),
            "finish_reason": _reason(part, parsed),
        }

    def _parse(self, part: Part) -> Message:
        if not self._request.offered_tools:
            return Message(part.text, [])
        found = parse_answer(self._service.tokenizer, self._text, self._marked_text(part), self._request.offered_tools)
        return found or Message(part.text, [])

    def _marked_text(self, whole: Part) -> str:
        """The text of a whole answer with its special tokens, which may mark calls. It ends where the text does."""
        tokenizer = self._service.tokenizer
        tokens = [step.token_id for step in whole.steps if step.token_id is not None]
        if whole.steps[-1].is_end or (whole.finish == "stop" and self._service.texts.is_special(tokens[-1])):
            del tokens[-1]
        marked = continuation(tokenizer, self._prompt, tokens, special=True)
        if whole.finish != "stop_text":
            return marked
        cut = continuation(tokenizer, self._prompt, tokens)[len(whole.text) :]
        return marked.removesuffix(cut) if marked.endswith(cut) else whole.text

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        found = []
        if part.index not in self._begun:
            self._begun.add(part.index)
            found.append(self._chunk(part.index, {"role": "assistant", "content": "", "refusal": None}))
        if self._request.offered_tools:
            return found + self._gather(part)
        entries = self._logprobs(part)
        if part.text or entries is not None:
            found.append(self._chunk(part.index, {"content": part.text}, entries))
        if part.finish is not None:
            found.append(self._chunk(part.index, {}, None, part.reason))
        return found

    def _gather(self, part: Part) -> list[dict[str, Any]]:
        """Nothing until the answer is whole."""
        whole = self._whole.setdefault(part.index, Part(part.index))
        whole.text += part.text
        whole.steps += part.steps
        whole.finish = part.finish
        if whole.finish is None:
            return []
        parsed = self._parse(whole)
        delta: dict[str, Any] = {"content": parsed.content} if parsed.content else {}
        if parsed.calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(parsed.calls)]
        return [
            self._chunk(part.index, delta, self._logprobs(whole)),
            self._chunk(part.index, {}, None, _reason(whole, parsed)),
        ]

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


def _reason(part: Part, parsed: Message) -> str | None:
    """An answer that was cut short has a call only as far as it came."""
    return "tool_calls" if parsed.calls and part.reason == "stop" else part.reason

"""/v1/completions: how its requests are read and its responses written."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from odmoe.serve.openai import logprobs
from odmoe.serve.openai.engine_request import EngineRequest, options_from_request
from odmoe.serve.openai.parts import Part
from odmoe.token_texts import Offsets
from scheduler.errors import PromptError, PromptTooLongError

if TYPE_CHECKING:
    from odmoe.serve.openai.requests import CompletionRequest
    from odmoe.serve.service import Service

MAX_TOKENS = 16
"""Of an answer if the request does not say, as OpenAI has it."""


def to_engine_request(service: Service, request: CompletionRequest) -> tuple[EngineRequest, list[str]]:
    """The request for the engine, and the prompts' texts where they are echoed. In a thread: it encodes prompts.

    Raises PromptError, ApiError.
    """
    how = options_from_request(service, request)
    if request.logprobs is not None:
        how["logprobs"] = request.logprobs
        if request.echo:
            how["prompt_logprobs"] = request.logprobs
    prompts = [_encode(service, prompt) for prompt in request.prompts]
    texts = []
    if request.echo:
        texts = [
            given if isinstance(given, str) else service.tokenizer.decode(given, skip_special_tokens=True)
            for given in request.prompts
        ]
    most = MAX_TOKENS if request.max_tokens is None else request.max_tokens
    found = EngineRequest(prompts, request.n, most, how)
    found.check_size(service.context)
    return found, texts


def _encode(service: Service, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        return service.model.opened.encode(prompt)
    if not 0 < len(prompt) < service.context:
        text = f"the prompt has {len(prompt)} tokens; allowed: 1 to {service.context - 1}, less its answer"
        raise PromptTooLongError.of(text, len(prompt), service.context) if prompt else PromptError(text)
    wrong = next((token for token in prompt if token >= len(service.tokenizer)), None)
    if wrong is not None:
        raise PromptError(f"the prompt has token {wrong}; allowed: 0 to {len(service.tokenizer) - 1}")
    return prompt


class CompletionShape:
    """Responses and events have the same shape."""

    def __init__(
        self,
        service: Service,
        request: CompletionRequest,
        engine_request: EngineRequest,
        texts: list[str],
        record_id: str,
    ) -> None:
        """`texts`: of the prompts, if they are echoed."""
        self._service, self._request, self._texts = service, request, texts
        self._engine_request = engine_request
        self._offsets: dict[int, Offsets] = {}
        self._head = {
            "id": f"cmpl-{record_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }

    def response(self, parts: list[Part], usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": [self._choice(part) for part in parts], "usage": usage}

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        choice = self._choice(part)
        if not choice["text"] and choice["logprobs"] is None and part.finish is None:
            return []
        return [self._chunk([choice])]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "choices": choices} | ({"usage": None} if self._request.include_usage else {})

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._chunk([]) | {"usage": usage}

    def _choice(self, part: Part) -> dict[str, Any]:
        first = part.index not in self._offsets
        offsets = self._offsets.get(part.index) or self._begin(part.index)
        text = "" if self._engine_request.max_new_tokens == 0 else part.text
        if first and self._texts:
            text = self._texts[self._engine_request.prompt_number(part.index)] + text
        return {
            "index": part.index,
            "text": text,
            "logprobs": self._logprobs(part, first, offsets),
            "finish_reason": part.reason,
        }

    def _begin(self, index: int) -> Offsets:
        """Of a choice's text, which without `echo` continues its prompt."""
        before = [] if self._texts else self._engine_request.prompt_of(index)
        self._offsets[index] = Offsets(self._service.texts, before)
        return self._offsets[index]

    def _logprobs(self, part: Part, first: bool, offsets: Offsets) -> dict[str, Any] | None:
        if self._request.logprobs is None or not part.steps:
            return None
        steps = part.steps if self._engine_request.max_new_tokens else []
        found = [step.logprobs for step in steps]
        ids = [step.token_id for step in steps if step.token_id is not None]
        if first and self._texts:
            found = [*(part.steps[0].prompt_logprobs or ()), *found]
            ids = [*self._engine_request.prompt_of(part.index), *ids]
        return logprobs.of_completion(self._service.texts, found, ids, offsets)

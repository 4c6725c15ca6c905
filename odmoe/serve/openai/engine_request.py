"""A request as the engine takes it: token ids, and how to answer them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from odmoe.serve.api_error import ApiError

if TYPE_CHECKING:
    from main_node.sampling import GenerateOptions, Sampling
    from odmoe.api.text_answer import TextAnswer
    from odmoe.serve.answers import AnswerFactory
    from odmoe.serve.openai.requests import AnswerRequest
    from odmoe.serve.service import Service

MOST_VALUES = 1 << 20
"""Tokens and log-probabilities of a request's answers: a response holds them all."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """`n` answers to each prompt, those to the first one first."""

    prompts: list[list[int]]
    n: int
    max_new_tokens: int
    """0: of the prompt's log-probabilities alone."""
    how: GenerateOptions

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def prompt_of(self, index: int) -> list[int]:
        """The prompt that choice `index` answers."""
        return self.prompts[self.prompt_number(index)]

    def prompt_number(self, index: int) -> int:
        return index // self.n

    def check_size(self, context: int) -> None:
        """Raises ApiError if the answers may have more than `MOST_VALUES` tokens and log-probabilities."""
        top = self.how.get("logprobs")
        each = 1 if top is None else 2 + top
        of_prompt = self.how.get("prompt_logprobs")
        each_of_prompt = 0 if of_prompt is None else 2 + of_prompt
        values = self.n * sum(
            min(self.max_new_tokens, context - len(prompt)) * each + len(prompt) * each_of_prompt
            for prompt in self.prompts
        )
        if values > MOST_VALUES:
            asked = f"prompts {len(self.prompts)}, n {self.n}, max_tokens {self.max_new_tokens}"
            asked += "" if top is None else f", logprobs {top}"
            raise ApiError(
                400,
                f"the answers may have {values} tokens and log-probabilities ({asked}); allowed in one request: "
                f"{MOST_VALUES}; ask for less at once",
                param="max_tokens",
                code="invalid_value",
            )

    def answer_factories(self, service: Service) -> list[AnswerFactory]:
        """A function for each answer, which begins it."""
        return [self._make(service, index) for index in range(len(self.prompts) * self.n)]

    def _make(self, service: Service, index: int) -> AnswerFactory:
        def make() -> TextAnswer:
            how = self.how.copy()
            how["sampling"] = with_own_seed(how["sampling"], index % self.n)
            return service.model.answer(self.prompt_of(index), max(1, self.max_new_tokens), how, service.notify)

        return make


def with_own_seed(sampling: Sampling, number: int) -> Sampling:
    """Of several answers to a prompt, each draws with a seed of its own."""
    if sampling.seed is None or not number:
        return sampling
    return replace(sampling, seed=(sampling.seed + number) % (1 << 63))


def options_from_request(service: Service, request: AnswerRequest) -> GenerateOptions:
    """How to answer, as arguments of `Cluster.generate`. What the request does not say is as in the settings."""
    from main_node.sampling import Sampling

    def value_of(name: str) -> float | None:
        value = getattr(request, name)
        return getattr(service.settings, name) if value is None else value  # type: ignore[no-any-return]

    top_k = value_of("top_k")
    sampling = Sampling(
        service.settings.sample,
        value_of("temperature"),
        None if top_k is None else int(top_k),
        value_of("top_p"),
        value_of("repetition_penalty"),
        request.seed,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        min_p=request.min_p or None,
        logit_bias=_biases(request.logit_bias, len(service.tokenizer)),
    )
    how: GenerateOptions = {
        "sampling": with_openai_defaults(sampling),
        "stop": request.stop,
        "ignore_eos": request.ignore_eos,
    }
    if request.stop_token_ids:
        how["stop_token_ids"] = _token_ids(request.stop_token_ids, len(service.tokenizer))
    schema = request.response_format.text if request.response_format is not None else None
    if schema is not None:
        how["schema"] = schema
    return how


def with_openai_defaults(sampling: Sampling) -> Sampling:
    """Where tokens are drawn, but not with the model's own settings (`--sample`), what neither the request nor the
    service says is as OpenAI's API has it: among all tokens, by the model's probabilities."""
    if not sampling.is_random or sampling.draw:
        return sampling
    temperature = 1.0 if sampling.temperature is None else sampling.temperature
    return replace(sampling, temperature=temperature, top_k=sampling.top_k or 0, top_p=sampling.top_p or 1.0)


def _token_ids(given: list[int], vocabulary: int) -> tuple[int, ...]:
    """Raises ApiError for a token that there is not."""
    wrong = next((token for token in given if token >= vocabulary), None)
    if wrong is not None:
        text = f"stop_token_ids has {wrong}; allowed: 0 to {vocabulary - 1}, the tokens of this model"
        raise ApiError(400, text, param="stop_token_ids", code="invalid_value")
    return tuple(given)


def _biases(given: dict[str, float], vocabulary: int) -> tuple[tuple[int, float], ...]:
    """Raises ApiError for a token that there is not."""
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocabulary):
            raise ApiError(
                400,
                f"logit_bias: {token!r} is not a token id of this model; allowed: 0 to {vocabulary - 1}",
                param="logit_bias",
                code="invalid_value",
            )
    return tuple((int(token), bias) for token, bias in given.items())

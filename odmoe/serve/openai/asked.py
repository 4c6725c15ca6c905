"""What a request asks of the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from odmoe.serve.api_error import ApiError

if TYPE_CHECKING:
    from main_node.sampling import How, Sampling
    from odmoe.api.text_answer import TextAnswer
    from odmoe.serve.answers import Make
    from odmoe.serve.openai.requests import AnswerRequest
    from odmoe.serve.service import Service


@dataclass(frozen=True, slots=True)
class Asked:
    """The answers of a request: `n` to each prompt, those to the first one first."""

    prompts: list[list[int]]
    n: int
    max_new_tokens: int
    """0: of the prompt's log-probabilities alone."""
    how: How

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def prompt_of(self, index: int) -> int:
        """Number of the prompt that choice `index` answers."""
        return index // self.n

    def makes(self, service: Service) -> list[Make]:
        """What begins each answer."""
        return [self._make(service, index) for index in range(len(self.prompts) * self.n)]

    def _make(self, service: Service, index: int) -> Make:
        def make() -> TextAnswer:
            how = self.how.copy()
            how["sampling"] = varied(how["sampling"], index % self.n)
            return service.model.answer(self.prompts[self.prompt_of(index)], max(1, self.max_new_tokens), how)

        return make


def varied(sampling: Sampling, number: int) -> Sampling:
    """Of several answers to a prompt, each draws with a seed of its own."""
    if sampling.seed is None or not number:
        return sampling
    return replace(sampling, seed=(sampling.seed + number) % (1 << 63))


def how_of(service: Service, request: AnswerRequest) -> How:
    """How to answer, as arguments of `Cluster.generate`. What the request does not say is as in the settings."""
    from main_node.sampling import Sampling

    def given(name: str) -> float | None:
        value = getattr(request, name)
        return getattr(service.settings, name) if value is None else value  # type: ignore[no-any-return]

    top_k = given("top_k")
    sampling = Sampling(
        service.settings.sample,
        given("temperature"),
        None if top_k is None else int(top_k),
        given("top_p"),
        given("repetition_penalty"),
        request.seed,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=_biases(request.logit_bias, len(service.tokenizer)),
    )
    how: How = {"sampling": sampling, "stop": request.stop, "ignore_eos": request.ignore_eos}
    schema = request.response_format.text if request.response_format is not None else None
    if schema is not None:
        how["schema"] = schema
    return how


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

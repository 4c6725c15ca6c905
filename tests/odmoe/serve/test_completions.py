"""/v1/completions, by the official client: the tokens of Transformers, in every shape of a response."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from main_node.sampling import GREEDY, Sampling
from odmoe.serve import routes
from odmoe.serve.api_error import ApiError
from odmoe.serve.openai.engine_request import MOST_VALUES, EngineRequest, with_openai_defaults
from odmoe.serve.writers import OpenAIWriter
from support.cases import slow_except
from support.machines.http_service import Served
from support.paths import DEMO

if TYPE_CHECKING:
    from openai import OpenAI

    from odmoe.api.model import Model

PROMPT = "Natalia sold clips"
NAME = "demo-moe"


@pytest.fixture(scope="module")
def whole() -> Any:
    """The model as Transformers has it."""
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, experts_implementation="eager").eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def greedy(whole: Any, tokenizer: Any) -> Callable[[str, int], list[int]]:
    """(prompt, tokens) -> what Transformers' own `generate` answers."""

    def answer(prompt: str, count: int) -> list[int]:
        inputs = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            out = whole.generate(**inputs, max_new_tokens=count, do_sample=False)
        return out[0, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]

    return answer


def log_probabilities(whole: Any, ids: list[int]) -> torch.Tensor:
    """[T, V]: of what follows each token."""
    with torch.inference_mode():
        return whole(torch.tensor([ids])).logits[0].float().log_softmax(-1)  # type: ignore[no-any-return]


def streamed(client: OpenAI, **asked: Any) -> tuple[str, list[Any]]:
    """The text of a stream's one choice, and its events."""
    events = list(client.completions.create(model=NAME, stream=True, **asked))
    return "".join(choice.text for event in events for choice in event.choices), events


def test_a_whole_answer(client: OpenAI, greedy: Any, tokenizer: Any) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12)
    tokens = greedy(PROMPT, 12)
    assert answer.choices[0].text == tokenizer.decode(tokens)
    assert (answer.object, answer.model, answer.choices[0].finish_reason) == ("text_completion", NAME, "length")
    prompt_tokens = len(tokenizer(PROMPT)["input_ids"])
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt_tokens, 12)
    assert usage.total_tokens == prompt_tokens + 12


def test_a_stream(client: OpenAI, greedy: Any, tokenizer: Any) -> None:
    text, events = streamed(client, prompt=PROMPT, max_tokens=12, stream_options={"include_usage": True})
    assert text == tokenizer.decode(greedy(PROMPT, 12))
    assert len({event.id for event in events}) == 1
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == 12
    assert [event.usage for event in events[:-1]] == [None] * (len(events) - 1)
    assert [event.choices[0].finish_reason for event in events[:-1]] == [None] * (len(events) - 2) + ["length"]


def test_without_max_tokens_there_are_sixteen(client: OpenAI) -> None:
    usage = client.completions.create(model=NAME, prompt=PROMPT).usage
    assert usage is not None
    assert usage.completion_tokens == 16


@pytest.mark.slow
def test_characters_of_several_tokens_arrive_whole(client: OpenAI, tokenizer: Any) -> None:
    """The bias makes the answer one token, a byte of no character, and then characters of four bytes."""
    emoji = tokenizer("😀", add_special_tokens=False)["input_ids"]
    assert len(emoji) == 4
    for token in emoji:
        wrong = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=3, logit_bias={str(token): 100})
        assert wrong.choices[0].text == tokenizer.decode([token] * 3)
    prompt = "😀" * 12
    text, events = streamed(client, prompt=prompt, max_tokens=8, logit_bias=dict.fromkeys(map(str, emoji), 30))
    assert (
        text
        == client.completions.create(
            model=NAME, prompt=prompt, max_tokens=8, logit_bias=dict.fromkeys(map(str, emoji), 30)
        )
        .choices[0]
        .text
    )
    for event in events[:-1]:
        assert event.choices[0].text
        assert not event.choices[0].text.endswith("\N{REPLACEMENT CHARACTER}") or event is events[-2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8, "seed": 7},
        {"temperature": 1.3, "seed": 8, "top_p": 0.7},
        {"seed": 9, "top_p": 0.9, "extra_body": {"top_k": 5}},
        {"temperature": 0, "top_p": 0.5, "seed": 3},
    ],
    ids=str,
)
def test_a_seed_draws_the_tokens_of_odmoe_generate(
    client: OpenAI, model: Model, tokenizer: Any, options: dict[str, Any]
) -> None:
    given = {name: value for name, value in options.items() if name != "extra_body"} | options.get("extra_body", {})
    if options.get("temperature") != 0:
        given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | given
    with model.answer(tokenizer(PROMPT)["input_ids"], 10, {"sampling": Sampling(**given)}) as answer:
        expected = "".join(piece.text for piece in answer)
    text, _ = streamed(client, prompt=PROMPT, max_tokens=10, **options)
    assert text == expected
    again = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=10, n=3, **options)
    assert again.choices[0].text == expected
    drawn = options.get("temperature") != 0
    assert (len({choice.text for choice in again.choices}) > 1) == drawn


@pytest.mark.slow
def test_a_temperature_alone_draws_among_all_tokens(client: OpenAI) -> None:
    """As OpenAI's API, and unlike Transformers, which would leave all but 50 tokens out."""
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 24, "temperature": 1.5, "seed": 11}
    every = client.completions.create(**asked, extra_body={"top_k": 0}).choices[0].text
    some = client.completions.create(**asked, extra_body={"top_k": 50}).choices[0].text
    assert client.completions.create(**asked).choices[0].text == every != some


def test_with_the_models_own_settings_nothing_is_filled_in() -> None:
    own = Sampling(draw=True, top_p=0.5)
    assert with_openai_defaults(own) is own
    assert with_openai_defaults(Sampling(temperature=0, top_p=0.5)).top_k is None
    assert with_openai_defaults(Sampling(top_p=0.5, seed=1)) == Sampling(temperature=1.0, top_k=0, top_p=0.5, seed=1)


@pytest.mark.parametrize("stop", slow_except([["xyz", "City"]], ["\n", ["xyz", "City"]]), ids=str)
def test_stop_texts(client: OpenAI, stop: Any) -> None:
    text = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12).choices[0].text
    first = [stop] if isinstance(stop, str) else stop
    expected = text[: min(text.find(one) for one in first if one in text)]
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, stop=stop)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    parts, events = streamed(client, prompt=PROMPT, max_tokens=12, stop=stop)
    assert (parts, events[-1].choices[0].finish_reason) == (expected, "stop")


@pytest.mark.slow
def test_penalties_change_the_answer(client: OpenAI) -> None:
    """One that repeats some of its tokens."""
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 40}
    plain = client.completions.create(**asked).choices[0].text
    for name in ("presence_penalty", "frequency_penalty"):
        assert client.completions.create(**asked, **{name: 2.0}).choices[0].text != plain


def test_a_bias_of_100_chooses_its_token(client: OpenAI, tokenizer: Any) -> None:
    token = tokenizer(" clips", add_special_tokens=False)["input_ids"][0]
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=3, logit_bias={str(token): 100})
    assert answer.choices[0].text == tokenizer.decode([token] * 3)


@pytest.mark.parametrize("as_ids", slow_except([True], [False, True]))
def test_several_prompts(client: OpenAI, greedy: Any, tokenizer: Any, as_ids: bool) -> None:
    texts = [PROMPT, "The weather", "A"]
    prompts: Any = [tokenizer(text)["input_ids"] for text in texts] if as_ids else texts
    answer = client.completions.create(model=NAME, prompt=prompts, max_tokens=4, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices[::2]] == [tokenizer.decode(greedy(text, 4)) for text in texts]
    assert [choice.text for choice in answer.choices[1::2]] == [choice.text for choice in answer.choices[::2]]
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens == 24


def test_several_prompts_in_one_stream(client: OpenAI, greedy: Any, tokenizer: Any) -> None:
    texts = [PROMPT, "The weather", "She has 3 apples"]
    found = ["", "", ""]
    for event in client.completions.create(model=NAME, prompt=texts, max_tokens=5, stream=True):
        for choice in event.choices:
            found[choice.index] += choice.text
    assert found == [tokenizer.decode(greedy(text, 5)) for text in texts]


def test_log_probabilities_are_those_of_transformers(client: OpenAI, whole: Any, greedy: Any, tokenizer: Any) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=6, logprobs=3)
    tokens, prompt = greedy(PROMPT, 6), tokenizer(PROMPT)["input_ids"]
    expected = log_probabilities(whole, prompt + tokens)[len(prompt) - 1 :]
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens == [tokenizer.decode([token]) for token in tokens]
    assert found.token_logprobs == pytest.approx(
        [expected[place, token].item() for place, token in enumerate(tokens)], abs=1e-4
    )
    for place, top in enumerate(found.top_logprobs or []):
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(
            expected[place].topk(3).values.tolist(), abs=1e-4
        )
    assert found.text_offset == [len(tokenizer.decode(tokens[:count])) for count in range(6)]


def test_responses_are_made_beside_the_event_loop(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones take seconds to encode."""
    on_loop = []

    def noting(make: Any) -> Any:
        def made(*given: Any) -> Any:
            on_loop.append(asyncio._get_running_loop() is not None)
            return make(*given)

        return made

    monkeypatch.setattr(OpenAIWriter, "whole", noting(OpenAIWriter.whole))
    monkeypatch.setattr(OpenAIWriter, "events", noting(OpenAIWriter.events))
    monkeypatch.setattr(routes, "_MANY", 0)
    client.completions.create(model=NAME, prompt=PROMPT, max_tokens=6, logprobs=2)
    streamed(client, prompt=PROMPT, max_tokens=6, logprobs=2)
    assert len(on_loop) > 1
    assert not any(on_loop)


def test_streamed_log_probabilities_are_the_same(client: OpenAI) -> None:
    whole = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=6, logprobs=2).choices[0].logprobs
    _, events = streamed(client, prompt=PROMPT, max_tokens=6, logprobs=2)
    parts = [event.choices[0].logprobs for event in events if event.choices[0].logprobs]
    assert whole is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for part in parts for one in getattr(part, name)] == getattr(whole, name)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echoed_log_probabilities_as_evaluation_harnesses_read_them(
    client: OpenAI, whole: Any, tokenizer: Any, max_tokens: int
) -> None:
    """lm-evaluation-harness sends token ids, and sums `token_logprobs[context:-1]` of max_tokens 1."""
    texts = [PROMPT + " to 48 of her friends", "Hello wörld"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    answer = client.completions.create(
        model=NAME, prompt=prompts, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0, seed=1234
    )
    for text, ids, choice in zip(texts, prompts, answer.choices, strict=True):
        expected = log_probabilities(whole, ids)
        found = choice.logprobs
        assert found is not None
        assert found.token_logprobs is not None
        assert found.top_logprobs is not None
        assert found.text_offset is not None
        assert len(found.token_logprobs) == len(ids) + max_tokens
        assert found.token_logprobs[0] is None
        of_prompt = [expected[place, token].item() for place, token in enumerate(ids[1:])]
        assert found.token_logprobs[1 : len(ids)] == pytest.approx(of_prompt, abs=1e-4)
        best = expected[:-1].argmax(-1).tolist()
        for place, token in enumerate(ids[1:]):
            top = found.top_logprobs[place + 1]
            assert (found.token_logprobs[place + 1] == max(top.values())) == (token == best[place])
        assert choice.text.startswith(text)
        assert (choice.text == text) == (max_tokens == 0)
        assert found.text_offset[: len(ids)] == [
            len(tokenizer.decode(ids[:count], skip_special_tokens=True).rstrip("\N{REPLACEMENT CHARACTER}"))
            for count in range(len(ids))
        ]


def test_echo_without_log_probabilities(client: OpenAI, greedy: Any, tokenizer: Any) -> None:
    text, _ = streamed(client, prompt=PROMPT, max_tokens=4, echo=True)
    assert text == PROMPT + tokenizer.decode(greedy(PROMPT, 4))
    none = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=0, echo=True)
    assert none.choices[0].text == PROMPT
    assert none.usage is not None
    assert none.usage.completion_tokens == 0


def test_fields_that_identify_the_sender_change_nothing(client: OpenAI) -> None:
    plain = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=4).choices[0].text
    named = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=4, user="me", best_of=1, suffix=None, extra_body={"metadata": {"a": "b"}}
    )
    assert named.choices[0].text == plain


CODE = "context_length_exceeded"
OVERFLOW = "This model's maximum context length is 1024 tokens. However, your prompt has "
LONG = {"max_tokens": 1000, "n": 128, "logprobs": 20}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"temperature": 1e-300}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"max_tokens": "many"}, "max_tokens", "invalid_value"),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
    ({"stop": ["a"] * 65}, "stop", "invalid_value"),
    ({"stop": "a" * 1025}, "stop", "invalid_value"),
    ({"extra_body": {"stop": [1]}}, "stop", "invalid_value"),
    ({"extra_body": {"top_k": -2}}, "top_k", "invalid_value"),
    ({"logit_bias": dict.fromkeys(map(str, range(4097)), 1)}, "logit_bias", "invalid_value"),
    ({"extra_body": {"prompt": [1] * 50_000 + ["a"]}}, "prompt", "invalid_value"),
    ({"extra_body": {"prompt": [[1], []]}}, "prompt", "invalid_value"),
    ({"extra_body": {"prompt": [True]}}, "prompt", "invalid_value"),
    ({"extra_body": {"prompt": [-1]}}, "prompt", "invalid_value"),
    ({"suffix": "end"}, "suffix", "unsupported_parameter"),
    ({"extra_body": {"mirostat": 2}}, "mirostat", "unsupported_parameter"),
    ({"extra_body": {"functions": [{"name": "f"}]}}, "functions", "unsupported_parameter"),
    ({"extra_body": {"guided_json": {"type": "object"}}}, "guided_json", "unsupported_parameter"),
    ({"extra_body": {"min_p": 1.5}}, "min_p", "invalid_value"),
    ({"best_of": 2}, "best_of", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"prompt": ""}, "the prompt is empty", "invalid_prompt"),
    ({"prompt": [[5000]]}, "the prompt has token 5000; allowed: 0 to 2047", "invalid_prompt"),
    ({"prompt": [1] * 1024}, OVERFLOW + "1024 tokens", CODE),
    ({"prompt": "a" * 200_000}, OVERFLOW + "at least ", CODE),
    ({"prompt": ["a"] * 1000, "n": 5}, "n is 5 with 1000 prompts; allowed: 4096 answers", "invalid_value"),
    (LONG, "the answers may have 2816000 tokens and log-probabilities", "invalid_value"),
]


@pytest.mark.parametrize(("options", "says", "code"), WRONG, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_refused_by_name(
    client: OpenAI, options: dict[str, Any], says: str, code: str, stream: bool
) -> None:
    """`says`: the field's name, or more of the sentence that the message begins with."""
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 2, "stream": stream} | options
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(model=NAME, **asked)
    error = found.value
    body: Any = error.body
    assert error.code == code
    assert error.type == "invalid_request_error"
    assert re.match(rf"{re.escape(says)}\b", body["message"]), body
    named = {"invalid_prompt": "prompt", CODE: "prompt"}.get(code, says.split(maxsplit=1)[0])
    assert error.param == ("max_tokens" if options is LONG else named)


def test_whoever_runs_the_service_is_told_of_retries() -> None:
    told = object()
    service: Any = SimpleNamespace(model=SimpleNamespace(answer=lambda *given: given), notify=told)
    how: Any = {"sampling": Sampling(seed=4)}
    found = [make() for make in EngineRequest([[1], [2]], 2, 0, how).answer_factories(service)]
    assert [(prompt, most, given["sampling"].seed) for prompt, most, given, _ in found] == [
        ([1], 1, 4),
        ([1], 1, 5),
        ([2], 1, 4),
        ([2], 1, 5),
    ]
    assert all(notify is told for *_, notify in found)


def test_what_a_request_may_ask_for(served: Served) -> None:
    """A response holds all of it: answers, their tokens, log-probabilities of each, those of the prompt."""
    context = served.service.context
    how: Any = {"sampling": GREEDY}
    EngineRequest([[1]] * 64, 16, 1000, how).check_size(context)
    whole = MOST_VALUES // 4
    EngineRequest([[1]], 4, whole, how).check_size(2 * whole)
    with pytest.raises(ApiError, match=rf"may have {4 * whole + 4} tokens .*prompts 1, n 4, max_tokens {whole + 1}\)"):
        EngineRequest([[1]], 4, whole + 1, how).check_size(2 * whole)
    EngineRequest([[1] * 2], 4, 10 * whole, how).check_size(whole + 2)
    with pytest.raises(ApiError, match="may have"):
        EngineRequest([[1] * 1000] * 100, 4, 1, {**how, "logprobs": 1, "prompt_logprobs": 1}).check_size(context)


def test_another_models_name(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4' does not exist; 'demo-moe' is served") as found:
        client.completions.create(model="gpt-4", prompt=PROMPT)
    assert (found.value.code, found.value.param) == ("model_not_found", "model")
    assert client.completions.create(model=str(DEMO), prompt=PROMPT, max_tokens=1).choices
    assert [one.id for one in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "odmoe"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")

"""/v1/chat/completions, by the official client: the chat in the model's template, formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from support.chats.demo_chat import CHAT, TOOL, answer

if TYPE_CHECKING:
    from openai import OpenAI

    from odmoe.api.model import Model

TEXT = "<s><system>be brief</system><user>hi</user><assistant>"


@pytest.fixture(scope="module")
def expected(model: Model) -> str:
    """The answer to the chat's text as a prompt, without another beginning-of-text token."""
    ids = model.opened.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert ids.count(0) == 1
    from main_node.sampling import GREEDY

    with model.answer(ids, 8, {"sampling": GREEDY}) as found:
        return "".join(piece.text for piece in found)


PREFILLED: list[Any] = [*CHAT, {"role": "assistant", "content": "The answer"}]


def test_an_answer_goes_on_with_the_last_message(client: OpenAI, model: Model) -> None:
    """As Transformers' `continue_final_message`: the prompt ends within the message, which is not in the answer."""
    tokenizer = model.opened.tokenizer
    how = {"continue_final_message": True, "add_generation_prompt": False}
    ids = tokenizer.apply_chat_template(PREFILLED, tokenize=True, return_dict=False, **how)
    assert tokenizer.decode(ids).endswith("The answer")
    from main_node.sampling import GREEDY

    with model.answer(ids, 8, {"sampling": GREEDY}) as found:
        expected = "".join(piece.text for piece in found)
    got = answer(client, messages=PREFILLED, extra_body=how)
    assert got.choices[0].message.content == expected
    assert got.usage.prompt_tokens == len(ids)
    alone = answer(client, messages=PREFILLED, extra_body={"continue_final_message": True})
    assert alone.choices[0].message.content == expected, "a client need not say that no message is begun"
    ended = answer(client, messages=PREFILLED, extra_body={"add_generation_prompt": False})
    assert ended.usage.prompt_tokens > len(ids), "the message is closed, and none is begun"
    assert ended.usage.prompt_tokens < answer(client, messages=PREFILLED).usage.prompt_tokens


def test_both_at_once_is_refused(client: OpenAI) -> None:
    how = {"continue_final_message": True, "add_generation_prompt": True}
    with pytest.raises(
        openai.BadRequestError, match="continue_final_message and add_generation_prompt are both true"
    ) as raised:
        answer(client, messages=PREFILLED, extra_body=how)
    assert raised.value.param == "continue_final_message"


@pytest.mark.slow
def test_stop_tokens(client: OpenAI, model: Model, expected: str) -> None:
    """The answer ends with one of them, which is no part of its text; not only where it is special."""
    ids = model.opened.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    from main_node.sampling import GREEDY

    with model.answer(ids, 8, {"sampling": GREEDY}) as found:
        pieces = list(found)
    tokens = [piece.step.token_id for piece in pieces]
    at = next(i for i in range(1, 8) if tokens[i] not in tokens[:i] and pieces[i].text)
    got = answer(client, extra_body={"stop_token_ids": [tokens[at], 5000 % 2048]})
    assert got.choices[0].message.content == "".join(piece.text for piece in pieces[:at])
    assert (got.choices[0].finish_reason, got.usage.completion_tokens) == ("stop", at + 1)
    stream = answer(client, stream=True, extra_body={"stop_token_ids": [tokens[at]]})
    assert "".join(one.choices[0].delta.content or "" for one in stream) == got.choices[0].message.content
    for wrong in ([-1], [1 << 20], ["a"], 5):
        with pytest.raises(openai.BadRequestError, match="stop_token_ids"):
            answer(client, extra_body={"stop_token_ids": wrong})


def test_a_whole_answer(client: OpenAI, expected: str) -> None:
    found = answer(client)
    choice = found.choices[0]
    assert (found.object, choice.message.role, choice.message.content) == ("chat.completion", "assistant", expected)
    assert (choice.finish_reason, choice.message.tool_calls, found.usage.completion_tokens) == ("length", None, 8)


def test_a_stream(client: OpenAI, expected: str) -> None:
    events = list(answer(client, stream=True, stream_options={"include_usage": True}))
    assert {event.object for event in events} == {"chat.completion.chunk"}
    *parts, last = events
    assert (last.choices, last.usage.completion_tokens) == ([], 8)
    assert parts[0].choices[0].delta.role == "assistant"
    assert all(part.choices[0].delta.role is None for part in parts[1:])
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]


@pytest.mark.parametrize(
    "change",
    [
        {"max_completion_tokens": None, "max_tokens": 8},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}, CHAT[1]]},
        {"response_format": {"type": "text"}},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [{"type": "function", "function": {"name": "x", "strict": True}}]},  # the template knows no tools
        {"parallel_tool_calls": False, "reasoning_effort": "low"},
        {"parallel_tool_calls": True, "service_tier": "auto", "store": False, "metadata": {"a": "b"}, "user": "me"},
    ],
    ids=lambda change: ",".join(change),
)
def test_other_ways_to_ask_the_same(client: OpenAI, expected: str, change: dict[str, Any]) -> None:
    given = {"max_completion_tokens": 8} | change
    assert answer(client, **given).choices[0].message.content == expected


@pytest.mark.slow
def test_several_answers(client: OpenAI) -> None:
    whole = [one.message.content for one in answer(client, n=3, temperature=1.2, seed=5).choices]
    assert len(set(whole)) > 1
    parts = ["", "", ""]
    for event in answer(client, n=3, temperature=1.2, seed=5, stream=True):
        for choice in event.choices:
            parts[choice.index] += choice.delta.content or ""
    assert parts == whole


def test_without_a_limit_it_goes_on_to_the_end_of_the_context(client: OpenAI, model: Model) -> None:
    tokenizer, context = model.opened.tokenizer, model.opened.context
    frame = len(tokenizer("<s><user></user><assistant>", add_special_tokens=False)["input_ids"])
    each = len(tokenizer(" clips" * 101)["input_ids"]) - len(tokenizer(" clips" * 100)["input_ids"])
    text = " clips" * ((context - frame - 8) // each)
    found = answer(
        client,
        messages=[{"role": "user", "content": text}],
        max_completion_tokens=None,
        extra_body={"ignore_eos": True},
    )
    assert found.choices[0].finish_reason == "length"
    assert found.usage.total_tokens == context
    assert found.usage.completion_tokens < 20


@pytest.mark.slow
def test_log_probabilities(client: OpenAI, expected: str) -> None:
    choice = answer(client, logprobs=True, top_logprobs=2).choices[0]
    content = choice.logprobs.content
    assert bytes(byte for one in content for byte in one.bytes).decode() == expected
    for one in content:
        assert [top.logprob for top in one.top_logprobs] == sorted((t.logprob for t in one.top_logprobs), reverse=True)
        assert len(one.top_logprobs) == 2
        assert (one.top_logprobs[0].token, one.top_logprobs[0].logprob) == (one.token, one.logprob)
    events = answer(client, logprobs=True, top_logprobs=2, stream=True)
    streamed = [one for event in events for c in event.choices if c.logprobs for one in c.logprobs.content]
    assert streamed == content
    assert answer(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "'image_url'"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "x", "audio": {"id": "1"}}]}, "messages.0.audio"),
    ({"top_logprobs": 2}, "logprobs"),
    ({"tools": [TOOL, {"type": "custom", "custom": {"name": "x"}}]}, "tools: item 1 is not a function"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice is not auto"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "the function 'sub'"),
    ({"tool_choice": "required"}, "tool_choice demands a call"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"reasoning_effort": "lots"}, "reasoning_effort"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"max_tokens": 3}, "max_completion_tokens"),
    ({"response_format": {"type": "json_schema"}}, "json_schema"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    (
        {"messages": [{"role": "user", "content": "a " * 2000}]},
        "maximum context length is 1024 tokens. However, your prompt has ",
    ),
    (
        {"messages": [{"role": "user", "content": "a" * 200_000}]},
        "maximum context length is 1024 tokens. However, your prompt has at least ",
    ),
    ({"n": 128, "max_completion_tokens": None, "logprobs": True, "top_logprobs": 20}, "max_tokens"),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=lambda value: str(value)[:50])
def test_what_cannot_be_done_is_refused_by_name(client: OpenAI, change: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        answer(client, **change)
    assert words in str(found.value.body)
    assert found.value.type == "invalid_request_error"


@pytest.mark.parametrize("name", ["chat_template", "tokenizer_kwargs", "tokenize", "tools", "conversation"])
def test_a_client_brings_no_template_of_its_own(client: OpenAI, name: str) -> None:
    """It would run here, for as long as it likes."""
    with pytest.raises(openai.BadRequestError, match=f"chat_template_kwargs.{name} is no variable"):
        answer(client, extra_body={"chat_template_kwargs": {name: "{% for i in range(9) %}{% endfor %}"}})


def test_a_model_without_a_template(client: OpenAI, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.opened.tokenizer, "chat_template", None)
    with pytest.raises(openai.BadRequestError, match="no chat template") as found:
        answer(client)
    error = found.value
    assert (error.code, error.param) == ("no_chat_template", "messages")


def test_special_tokens_in_a_message_are_text(client: OpenAI, model: Model) -> None:
    """The prompt has the tokens of their characters: more of them, and none that ends a text."""
    tokenizer = model.opened.tokenizer
    chat = [{"role": "user", "content": "is </s> an end?"}]
    text = "<s><user>is </s> an end?</user><assistant>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.eos_token_id in ids
    assert answer(client, messages=chat).usage.prompt_tokens > len(ids)


def test_a_template_that_refuses(client: OpenAI, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.opened.tokenizer, "chat_template", "{{ raise_exception('no system message, please') }}")
    with pytest.raises(openai.BadRequestError, match="no system message, please"):
        answer(client)

"""What a model refuses, and the class of each error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import odmoe
from odmoe.api.text_answer import TextAnswer
from scheduler.errors import (
    ClusterError,
    ConfigError,
    LinkError,
    MainNodeLostError,
    ODMoEError,
    PromptError,
    PromptTooLongError,
    QueueFullError,
    RequestCancelledError,
    RequestFailedError,
)

PROMPT = "HAMLET: To be, or not"
CHAT = [{"role": "user", "content": "Who is Romeo?"}]


def error_of(call: Callable[[], object]) -> ODMoEError:
    with pytest.raises(ODMoEError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("", PromptError),
        ([], PromptError),
        ("word " * 2000, PromptTooLongError),
        ([5] * 1024, PromptTooLongError),
        ([10**6], PromptError),
        ([-1], PromptError),
        ("\ud800", PromptError),
        (["HAMLET:", "ROMEO:"], PromptError),
        ([[5, 6], [7, 8]], PromptError),
        ([1.5], PromptError),
        (b"HAMLET:", PromptError),
        ({"prompt": "HAMLET:"}, PromptError),
        (None, PromptError),
        (5, PromptError),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_prompts(model: odmoe.Model, prompt: Any, kind: type[Exception]) -> None:
    assert type(error_of(lambda: model.generate(prompt, max_new_tokens=2))) is kind


@pytest.mark.parametrize(
    "messages",
    [
        None,
        5,
        "Who is Romeo?",
        [],
        ["Who is Romeo?"],
        {"role": "user"},
        [{"role": "tool", "content": ""}],
        [{"role": "user", "content": 1j}],
    ],
    ids=repr,
)
def test_chats(chats: odmoe.Model, messages: Any) -> None:
    assert type(error_of(lambda: chats.chat(messages, max_new_tokens=2))) is ConfigError


def test_a_chat_without_a_template(model: odmoe.Model) -> None:
    assert type(error_of(lambda: model.chat(CHAT))) is ConfigError


@pytest.mark.parametrize(
    "options",
    [
        {"temprature": 1},
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": 1j},
        {"temperature": float("nan")},
        {"max_new_tokens": 0},
        {"max_new_tokens": None},
        {"max_new_tokens": "many"},
        {"top_p": 2},
        {"top_k": 1.5},
        {"seed": -1},
        {"seed": "x"},
        {"stop": 5},
        {"stop": [5]},
        {"stop": ""},
        {"ignore_eos": "perhaps"},
        {"repetition_penalty": 0},
        {"presence_penalty": "much"},
        {"frequency_penalty": float("inf")},
        {"logit_bias": [5]},
        {"logit_bias": {"five": 1.0}},
        {"logit_bias": {5: "much"}},
        {"logprobs": "two"},
        {"logprobs": -1},
        {"logprobs": 1.5},
        {"schema": 5},
        {"schema": "{"},
        {"schema": {"type": 1j}},
        {"schema": {"type": "no such type"}},
    ],
    ids=repr,
)
def test_options(model: odmoe.Model, options: dict[str, Any]) -> None:
    error = error_of(lambda: model.generate(PROMPT, **options))
    assert type(error) is ConfigError
    assert next(iter(options)) in str(error)
    assert "--" not in str(error)


@pytest.mark.parametrize("raised", [RequestFailedError, QueueFullError, MainNodeLostError, LinkError])
@pytest.mark.parametrize("after", [0, 2])
def test_an_error_in_an_answer_reaches_the_caller(
    model: odmoe.Model, monkeypatch: pytest.MonkeyPatch, raised: type[ODMoEError], after: int
) -> None:
    whole = TextAnswer._read

    def failing(self: Any, *given: Any) -> Iterator[Any]:
        for number, piece in enumerate(whole(self, *given)):
            if number == after:
                raise raised("what went wrong")
            yield piece

    monkeypatch.setattr(TextAnswer, "_read", failing)
    stream = model.stream(PROMPT, max_new_tokens=4)
    error = error_of(lambda: list(stream))
    assert type(error) is raised
    assert "what went wrong" in str(error)


def test_a_closed_model(demo: Any) -> None:
    one = odmoe.load(demo, shadow="none", threads=1)
    open_one, unread = one.stream(PROMPT, max_new_tokens=900, ignore_eos=True), one.stream(PROMPT)
    next(open_one)
    one.close()
    for stream in (open_one, unread):
        with pytest.raises(RequestCancelledError):
            list(stream)
    with pytest.raises(ClusterError, match="closed"):
        one.stream(PROMPT)


def test_an_encoding_waits_for_the_one_under_way(model: odmoe.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer's settings are changed while it encodes."""
    import threading

    inside, go, most = threading.Semaphore(0), threading.Event(), [0, 0]

    def encode(*given: Any) -> list[int]:
        most[0] += 1
        most[1] = max(most)
        inside.release()
        assert go.wait(60)
        most[0] -= 1
        return [5]

    monkeypatch.setattr("odmoe.text.encode", encode)
    threads = [threading.Thread(target=model.opened.encode, args=("to be",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert inside.acquire(timeout=60)
    assert model.opened._encoding.locked()
    go.set()
    for thread in threads:
        thread.join(60)
    assert most == [0, 1]

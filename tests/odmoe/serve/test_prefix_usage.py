"""Tokens that the prefix cache had, as OpenAI's client reads them, and in the metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from odmoe.serve.openai.parts import usage_of
from support.machines.http_service import Served, demo_model, serving

if TYPE_CHECKING:
    from openai import OpenAI

NAME, BLOCK = "demo-moe", 16
PROMPT = list(range(40, 90))


@pytest.fixture(scope="module")
def served(demo_store: Callable[[str], Any]) -> Iterator[Served]:
    with demo_model(demo_store("float32"), kv_memory="64MiB", prefill_chunk=BLOCK) as model:
        model.opened.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        with serving(model) as made:
            yield made


def test_the_second_turn_says_what_the_first_has_left(client: OpenAI, served: Served) -> None:
    def ask(prompt: Any, **how: Any) -> Any:
        return client.completions.create(model=NAME, prompt=prompt, max_tokens=2, **how)

    first = ask(PROMPT[:40])
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    second = ask(PROMPT)
    assert (second.usage.prompt_tokens, second.usage.prompt_tokens_details.cached_tokens) == (50, 32)
    both = ask([PROMPT, PROMPT[:20]], n=2)
    assert both.usage.prompt_tokens_details.cached_tokens == 48 + 16
    assert both.choices[0].text == second.choices[0].text
    *_, last = ask(PROMPT, stream=True, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens_details.cached_tokens == 48
    assert served.counted("odmoe_cached_tokens_total") >= 32 + 48 + 16 + 48


def test_a_chat_says_it_too(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "the same long beginning of a conversation, told once more"}]
    for cached in (False, True):
        found = client.chat.completions.create(model=NAME, messages=messages, max_completion_tokens=2)
        assert (found.usage.prompt_tokens_details.cached_tokens > 0) is cached


def test_the_fields_are_those_of_openai() -> None:
    from openai.types import CompletionUsage

    usage = CompletionUsage.model_validate(usage_of(50, 2, 32), strict=True)
    assert usage.prompt_tokens_details is not None
    assert (usage.total_tokens, usage.prompt_tokens_details.cached_tokens) == (52, 32)

"""`odmoe.connect` with a real `odmoe serve`: the answers are those of the loaded model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

import odmoe
from odmoe.clusters.embedded import EmbeddedCluster
from scheduler.errors import ConfigError, LinkError, PromptError, RequestCancelledError, SecretError
from support.machines.http_service import Served, serving

PROMPT = "HAMLET: To be, or not"
MESSAGES = [{"role": "user", "content": "Who is Romeo?"}]
LIMIT_S = 60.0
KEY = "a key that nobody guesses"


@pytest.fixture(scope="module")
def served(service: Served) -> Iterator[odmoe.ServedModel]:
    with odmoe.connect(service.url) as found:
        yield found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.9, "top_k": 0, "seed": 5},
        {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "seed": 5, "repetition_penalty": 1.2},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"logit_bias": {5: 90.0}, "stop": ["zzz"], "ignore_eos": True},
    ],
)
def test_the_same_answers(model: odmoe.Model, served: odmoe.ServedModel, options: odmoe.Options) -> None:
    mine, theirs = (one.generate(PROMPT, max_new_tokens=8, **options) for one in (model, served))
    assert (theirs.text, theirs.finish) == (mine.text, mine.finish)
    assert (theirs.prompt_tokens, theirs.new_tokens) == (mine.prompt_tokens, mine.new_tokens)


def test_chats_in_chunks_and_whole(chats: odmoe.Model, served: odmoe.ServedModel) -> None:
    mine = chats.chat(MESSAGES, max_new_tokens=6)
    assert served.chat(MESSAGES, max_new_tokens=6).text == mine.text

    async def ask() -> str:
        return "".join([str(chunk) async for chunk in served.astream_chat(MESSAGES, max_new_tokens=6)])

    assert asyncio.run(ask()) == mine.text


def test_log_probabilities(chats: odmoe.Model, served: odmoe.ServedModel) -> None:
    mine = chats.generate(PROMPT, max_new_tokens=3, logprobs=2).logprobs
    assert mine is not None
    by_completion = served.generate(PROMPT, max_new_tokens=3, logprobs=2).logprobs
    assert by_completion is not None
    assert [one.logprob for one in by_completion] == pytest.approx([one.logprob for one in mine])
    for ours, theirs in zip(mine, by_completion, strict=True):
        assert [each.logprob for each in theirs.top] == pytest.approx([each.logprob for each in ours.top])
    by_chat = served.chat(MESSAGES, max_new_tokens=3, logprobs=2).logprobs
    local = chats.chat(MESSAGES, max_new_tokens=3, logprobs=2).logprobs
    assert by_chat is not None
    assert local is not None
    assert [one.logprob for one in by_chat] == pytest.approx([one.logprob for one in local])


def test_log_probabilities_of_the_prompt(model: odmoe.Model) -> None:
    found = model.generate(PROMPT, max_new_tokens=1, prompt_logprobs=1)
    assert found.prompt_logprobs is not None
    assert [one and one.token_id for one in found.prompt_logprobs] == [None, *model.opened.encode(PROMPT)[1:]]
    texts = [one.token for one in found.prompt_logprobs[1:] if one]
    assert all(texts)
    assert PROMPT.endswith("".join(texts))
    assert all(one is None or (one.logprob < 0 and len(one.top) == 1) for one in found.prompt_logprobs)


def test_a_cancelled_answer_ends_in_the_engine(model: odmoe.Model, served: odmoe.ServedModel) -> None:
    """Long before its last token: the engine has nothing to do any more."""
    assert isinstance(model.cluster, EmbeddedCluster)
    before = model.cluster.figures().totals.answer_tokens
    stream = served.stream(PROMPT, max_new_tokens=900, ignore_eos=True)
    next(stream)
    stream.cancel()
    with pytest.raises(RequestCancelledError):
        for _ in stream:
            pass
    end = time.monotonic() + LIMIT_S
    while model.cluster.main.admission.counts() != (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    assert model.cluster.main.admission.counts() == (0, 0)
    assert 0 < model.cluster.figures().totals.answer_tokens - before < 900


def test_refusals(model: odmoe.Model, served: odmoe.ServedModel) -> None:
    with pytest.raises(PromptError):
        served.generate("")
    with pytest.raises(PromptError, match="context"):
        served.generate("word " * 2000)
    with pytest.raises(ConfigError, match="temperature"):
        served.generate(PROMPT, temperature=-1)
    with serving(model, (KEY,)) as closed:
        with pytest.raises(SecretError):
            odmoe.connect(closed.url)
        with odmoe.connect(closed.url, KEY) as opened:
            assert opened.generate(PROMPT, max_new_tokens=1).new_tokens == 1
    with pytest.raises(LinkError, match="start one there with odmoe serve"):
        opened = odmoe.connect(closed.url, KEY)

"""What cannot be answered, and where answers end. Real nodes, one process."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from scheduler.errors import ConfigError, PromptError, RequestFailedError
from support.nodes.tapped_cluster import TappedCluster

pytestmark = pytest.mark.timeout(90)
TOKENS = 8


def test_prompts_that_cannot_be(cluster: TappedCluster) -> None:
    for prompt, named in (
        ([], "empty"),
        ([5] * 1024, "1024 tokens, the model's context is 1024"),
        ([5] * 3000, "3000 tokens"),
        ([5, 2048, 6], "token 2048; allowed: 0 to 2047"),
        ([-1], "token -1"),
    ):
        with pytest.raises(PromptError, match=named):
            next(cluster.main.generate(prompt, 4))
    for count in (0, -1):
        with pytest.raises(ConfigError, match=f"max-new-tokens is {count}; allowed: 1, 2"):
            next(cluster.main.generate([5], count))
    cluster.nothing_left()
    assert cluster.loads() == 0


@pytest.mark.slow
def test_workers_lost_within_an_answer(cluster: TappedCluster, expected: Any) -> None:
    steps = cluster.main.generate(expected.prompt, TOKENS, ignore_eos=True)
    got = [next(steps).token_id, next(steps).token_id]
    for tap in cluster.taps[1:]:
        tap.close()
    got.append(next(steps).token_id)
    assert got == expected.tokens[:3]
    cluster.taps[0].close()
    with pytest.raises(RequestFailedError, match="the last worker is gone: it closed its stream"):
        next(steps)
    cluster.nothing_left()


@pytest.mark.parametrize("room", [1, 2, 5])
def test_an_answer_ends_where_the_context_is_full(room: int, cluster: TappedCluster, expected: Any) -> None:
    cluster.main.shape = dataclasses.replace(cluster.main.shape, context=len(expected.prompt) + room)
    tokens, report = cluster.answer(expected.prompt, 10_000, ignore_eos=True)
    assert tokens == expected.tokens[:room]
    assert report.new_tokens == room


def test_the_real_context_can_be_filled(cluster: TappedCluster, expected: Any) -> None:
    prompt = (expected.prompt * 20)[:1021]
    tokens, report = cluster.answer(prompt, 50, ignore_eos=True)
    assert len(tokens) == report.new_tokens == 3
    assert report.prompt_tokens + report.new_tokens == 1024


@pytest.mark.slow
def test_the_tokenizers_end_and_stop_tokens(cluster: TappedCluster, expected: Any, monkeypatch: Any) -> None:
    """As vLLM has them: the tokenizer's end beside the model's, unless `ignore_eos`; stop tokens in any case."""
    first_new = next(i for i in range(2, TOKENS) if expected.tokens[i] not in expected.tokens[:i])
    last, until = expected.tokens[first_new], expected.tokens[: first_new + 1]
    for own in (None, [2047, 2046]):
        monkeypatch.setattr(cluster.main.model.generation_config, "eos_token_id", own)
        monkeypatch.setattr(cluster.main, "text", replace(cluster.main.text, end_token=last))
        tokens, report = cluster.answer(expected.prompt, TOKENS)
        assert (tokens, report.finish) == (until, "stop")
        assert cluster.answer(expected.prompt, TOKENS, ignore_eos=True)[0] == expected.tokens
        beyond = replace(cluster.main.text, end_token=1 << 20)  # of the vocabulary
        monkeypatch.setattr(cluster.main, "text", beyond)
        assert cluster.answer(expected.prompt, TOKENS)[0] == expected.tokens
        monkeypatch.setattr(cluster.main, "text", replace(cluster.main.text, end_token=None))
        for ignored in (False, True):
            how = {"ignore_eos": ignored, "stop_token_ids": (2040, last)}
            steps = list(cluster.main.generate(expected.prompt, TOKENS, **how))
            assert [step.token_id for step in steps[:-1]] == until
            assert [step.is_end for step in steps[:-1]] == [False] * first_new + [True]
    for wrong in (-1, 2048):
        with pytest.raises(ConfigError, match=f"stop_token_ids has {wrong}; allowed: 0 to 2047"):
            cluster.main.generate(expected.prompt, TOKENS, stop_token_ids=(wrong,))


def test_any_end_of_sequence_token_ends_the_answer(cluster: TappedCluster, expected: Any) -> None:
    first_new = next(i for i in range(2, TOKENS) if expected.tokens[i] not in expected.tokens[:i])
    last = expected.tokens[first_new]
    ends = cluster.main.model.generation_config
    for ids in (last, [2047, last], [last]):
        ends.eos_token_id = ids
        tokens, report = cluster.answer(expected.prompt, TOKENS)
        assert tokens == report.token_ids == expected.tokens[: first_new + 1]
    assert cluster.answer(expected.prompt, TOKENS, ignore_eos=True)[0] == expected.tokens
    ends.eos_token_id = None
    assert cluster.answer(expected.prompt, TOKENS)[0] == expected.tokens
    ends.eos_token_id = expected.tokens[0]
    tokens, report = cluster.answer(expected.prompt, TOKENS)
    assert tokens == expected.tokens[:1]
    assert report.decode_tokens_per_s is None
    cluster.nothing_left()

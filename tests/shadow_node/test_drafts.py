"""Drafts of the demo model: their tokens are its own greedy ones, and each way back ends where a fresh shadow is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from scheduler.drafts.path import START, extend
from support.shadows.shadow_client import LAYERS, PROMPT_TOKENS, MainAnswer, ShadowClient
from wire.messages import Align, Draft, Failed, Prediction

pytestmark = pytest.mark.timeout(120)
schemes = pytest.mark.parametrize("scheme", ["fp16", "int8", "nf4"])
departures = pytest.mark.parametrize("late", [False, True])
PASSES = 8


def aligned(
    main: ShadowClient, step: int, tokens: list[int], since: int, drafts: int, kv: tuple[Any, ...] = (), start: int = 0
) -> None:
    """A block of the passes from `since` to `step`, of request 1."""
    main.channel.send(
        Align(1, step, tokens[step], start or PROMPT_TOKENS + step, kv, drafts=drafts, before=tuple(tokens[since:step]))
    )
    main.settle()


def drafts_of(main: ShadowClient) -> list[tuple[int, int, int]]:
    return [(m.step, m.token, m.path) for m in main.of(Draft)]


def expected_drafts(tokens: list[int], first: int, last: int) -> list[tuple[int, int, int]]:
    return [(step, tokens[step], extend(START, tokens[:step])) for step in range(first, last + 1)]


def greedy(main: ShadowClient, prompt: tuple[int, ...], answer: list[int], count: int) -> list[int]:
    """`answer` and what the shadow's model says after it, `count` tokens in all, each in a pass of its own. Nothing
    else may use the model meanwhile, so the shadow's own thread must have nothing to do."""
    main.settle()
    model = main.shadow.model
    cache, tokens = model.new_cache(), list(answer)
    model.forward(list(prompt), cache)
    for step in range(count - 1):
        own = model.forward([tokens[step]], cache)
        if step + 1 == len(tokens):
            tokens.append(own)
    return tokens


def said(main: ShadowClient, number: int, step: int) -> list[Any]:
    """What was said last of each layer of a pass."""
    position = PROMPT_TOKENS + step
    found = {m.layer: m for m in main.of(Prediction) if (m.request, m.position) == (number, position)}
    return [(found[layer].experts, found[layer].scores) for layer in LAYERS]


@departures
def test_drafts_of_an_unquantised_shadow_are_transformers_greedy_tokens(
    late: bool, main_of: Any, answers: list[MainAnswer]
) -> None:
    main = main_of("fp16")
    tokens = answers[0].tokens
    main.open(1, answers[0], kv=0, late=late)
    aligned(main, 0, tokens, 0, drafts=4)
    assert drafts_of(main) == expected_drafts(tokens, 1, 5)
    aligned(main, 3, tokens, 1, drafts=4)  # a block of four, all right
    assert drafts_of(main) == expected_drafts(tokens, 1, 8)
    assert [main.predicted(1, step) for step in range(PASSES)] == [LAYERS] * PASSES, "no pass was run again"
    assert main.of(Failed) == []


@schemes
def test_drafts_are_the_shadows_own_tokens(scheme: str, main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of(scheme)
    main.open(1, answers[1], kv=0)
    token = (answers[1].tokens[0] + 3) % 2048
    expected = greedy(main, answers[1].prompt, [token], PASSES + 1)
    aligned(main, 0, [token], 0, drafts=20)
    assert drafts_of(main) == expected_drafts(expected, 1, PASSES)


@pytest.mark.parametrize(
    ("step", "other", "late", "scheme"),
    [
        (1, 1, False, "fp16"),
        (2, 2, True, "int8"),
        pytest.param(4, 1, False, "int8", marks=pytest.mark.slow),
        pytest.param(4, 3, True, "fp16", marks=pytest.mark.slow),
        pytest.param(4, 4, True, "nf4", marks=pytest.mark.slow),
        (6, 5, False, "nf4"),
    ],
)
def test_another_token_at_each_place_of_a_block(
    step: int, other: int, late: bool, scheme: str, main_of: Any, answers: list[MainAnswer]
) -> None:
    """`step` is announced, and `other` is the first pass that has read another token. Afterwards all predictions, the
    drafts and the cache are to the last bit those of a shadow that has read the main model's tokens all along."""
    main = main_of(scheme)
    own = greedy(main, answers[0].prompt, [answers[0].tokens[0]], PASSES)
    right = [*own[:other], (own[other] + 7) % 2048]
    right = greedy(main, answers[0].prompt, right, step + 1)
    right = greedy(main, answers[0].prompt, [*right[:step], (right[step] + 11 * (step > other)) % 2048], PASSES + 1)
    main.open(90, answers[0], kv=0, late=True)
    for one in range(PASSES):
        main.align(90, one, token=right[one])
        main.settle()
    fresh = [said(main, 90, one) for one in range(PASSES)]
    cache = main.cache(90)
    main = main_of(scheme)
    main.open(1, answers[0], kv=0, late=late)
    aligned(main, 0, own, 0, drafts=5)
    aligned(main, step, right, 1, drafts=20)
    assert [said(main, 1, one) for one in range(PASSES)] == fresh
    for mine, wanted in zip(main.cache(1), cache, strict=True):
        assert torch.equal(mine, wanted)
    table: dict[int, tuple[int, int]] = {}
    for at, token, path in drafts_of(main):
        table = {before: draft for before, draft in table.items() if before < at} | {at: (token, path)}
    assert [(at, *table[at]) for at in range(step + 1, PASSES + 1)] == expected_drafts(right, step + 1, PASSES)
    assert main.of(Failed) == []


def test_after_a_refused_block_all_is_predicted_again(main_of: Any, answers: list[MainAnswer]) -> None:
    """What was predicted for the refused rows is used up, even where it is the same."""
    main = main_of()
    tokens = answers[0].tokens
    main.open(1, answers[0], kv=0)
    aligned(main, 0, tokens, 0, drafts=4)
    other = [*tokens[:2], (tokens[2] + 7) % 2048]
    aligned(main, 2, other, 1, drafts=2)
    counts = [len(main.predicted(1, step)) for step in range(5)]
    assert counts == [8, 8, 16, 16, 16]


@schemes
def test_rows_of_a_block_are_taken_over_and_no_pass_is_run_again(
    scheme: str, main_of: Any, answers: list[MainAnswer]
) -> None:
    main = main_of(scheme)
    own = greedy(main, answers[0].prompt, [answers[0].tokens[0]], 2)
    main.open(1, answers[0])
    main.align(1, 0)
    main.settle()
    aligned(main, 1, own, 1, 3, answers[0].rows(PROMPT_TOKENS, PROMPT_TOKENS + 1), PROMPT_TOKENS)
    drafts = {step: token for step, token, _ in drafts_of(main)}
    tokens = [*own[:2], drafts[2], drafts[3]]
    before = [list(main.predicted(1, step)) for step in range(5)]
    aligned(main, 3, tokens, 2, 3, answers[0].rows(PROMPT_TOKENS + 1, PROMPT_TOKENS + 3), PROMPT_TOKENS + 1)
    assert [main.predicted(1, step) for step in range(5)] == before
    assert [main.predicted(1, step) for step in (5, 6)] == [LAYERS, LAYERS]
    end = PROMPT_TOKENS + 3
    for mine, told in zip(main.cache(1), answers[0].kv, strict=True):
        assert torch.equal(mine[:, :, :end], told[:, :, :end].to(mine.dtype))
        assert mine.shape[2] == PROMPT_TOKENS + 7
    assert main.of(Failed) == []


def test_two_requests_draft_side_by_side(main_of: Any, answers: list[MainAnswer]) -> None:
    """In lock-step, each with its own drafts."""
    main = main_of("fp16")
    for number in (1, 2):
        main.open(number, answers[number - 1], kv=0, late=False)
    for number in (1, 2):
        main.channel.send(Align(number, 0, answers[number - 1].tokens[0], PROMPT_TOKENS, (), drafts=4))
    main.settle()
    for number in (1, 2):
        found = [(m.step, m.token, m.path) for m in main.of(Draft) if m.request == number]
        assert found == expected_drafts(answers[number - 1].tokens, 1, 5)


def test_rows_of_a_block_in_parts_count_with_the_last(main_of: Any, answers: list[MainAnswer]) -> None:
    """And so do its tokens: until then nothing goes back, and no draft is asked for."""
    main = main_of("fp16")
    answer, end = answers[0], PROMPT_TOKENS + 3
    main.open(1, answer)
    main.channel.send(Align(1, 0, answer.tokens[0], 0, answer.rows(0, PROMPT_TOKENS), drafts=3))
    main.settle()
    other = (answer.tokens[2] + 7) % 2048
    tokens = [*answer.tokens[:2], other]
    more = greedy(main, answer.prompt, tokens, 4)
    cuts, before = (PROMPT_TOKENS, PROMPT_TOKENS + 1, end), len(main.of(Draft))
    for start, stop in itertools.pairwise(cuts):
        main.channel.send(
            Align(1, 3, more[3], start, answer.rows(start, stop), stop < end, drafts=1, before=tuple(more[1:3]))
        )
        main.settle()
        if stop < end:
            assert len(main.of(Draft)) == before
    found = drafts_of(main)[before:]
    assert [step for step, _, _ in found] == [3, 4, 5]
    assert found[1][2] == extend(START, more[:4])
    for mine, told in zip(main.cache(1), answer.kv, strict=True):
        assert torch.equal(mine[:, :, :end], told[:, :, :end].to(mine.dtype))
        assert mine.shape[2] == end + 2
    assert main.of(Failed) == []

"""What an alignment changes, and what the shadow says of a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from checkpoint.tensors import tensor_bytes
from support.shadows.shadow_client import PROMPT_TOKENS, MainAnswer, routes_of
from wire.messages import (
    Align,
    CloseRequest,
    Failed,
    Prediction,
    Tensor,
)

pytestmark = pytest.mark.timeout(90)
both = pytest.mark.parametrize("scheme", ["fp16", "nf4"])


# --- what an alignment changes ----------------------------------------------------------------------------------------


@both
def test_an_aligned_pass_reads_the_main_models_token(scheme: str, main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of(scheme)
    model, cache = main.shadow.model, main.shadow.model.new_cache()
    own, _ = routes_of(model, list(answers[0].prompt), cache)
    other = (own + 7) % 2048
    _, expected = routes_of(model, [other], cache)
    main.open(1, answers[0], token=1, kv=0)
    main.align(1, 0, token=other)
    assert main.passes(1) == [0]
    assert main.routes(1, 0) == expected


def test_an_unaligned_pass_reads_the_shadows_own_token(main_of: Any, answers: list[MainAnswer]) -> None:
    """Token never, KV every pass: the main model's rows, the shadow's token."""
    main = main_of("nf4")
    model, cache = main.shadow.model, main.shadow.model.new_cache()
    own, _ = routes_of(model, list(answers[0].prompt), cache)
    for layer, (keys, values) in zip(cache.layers, pairs(answers[0].kv), strict=True):
        layer.keys = keys[:, :, :PROMPT_TOKENS].to(layer.keys.dtype)
        layer.values = values[:, :, :PROMPT_TOKENS].to(layer.values.dtype)
    _, expected = routes_of(model, [own], cache)
    main.open(1, answers[0], token=0, kv=1)
    main.align(1, 0)
    assert main.passes(1) == [0]
    assert main.routes(1, 0) == expected


def pairs(kv: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(kv[::2], kv[1::2], strict=True))


@both
@pytest.mark.parametrize("parts", [1, 3])
def test_aligned_rows_are_the_main_models(scheme: str, parts: int, main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of(scheme)
    main.open(1, answers[0], token=2, kv=2, lookahead=9)
    for step in (0, 2, 4):
        main.align(1, step, parts=parts)
        main.align(1, step + 1)
        assert main.passes(1)[-1] == step + 1
        end = PROMPT_TOKENS + step
        for held, told in zip(main.cache(1), answers[0].kv, strict=True):
            assert torch.equal(held[:, :, :end], told[:, :, :end].to(held.dtype))
            assert held.shape[2] == end + 2
    assert main.of(Failed) == []


def test_without_kv_alignment_the_rows_stay_its_own(main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of("nf4")
    main.open(1, answers[0], token=1, kv=0)
    for step in range(3):
        main.align(1, step)
    assert main.passes(1) == [0, 1, 2]
    assert not any(
        torch.equal(held, told[:, :, : PROMPT_TOKENS + 3].to(held.dtype))
        for held, told in zip(main.cache(1), answers[0].kv, strict=True)
    )


@both
def test_parts_do_not_depart_before_the_last(scheme: str, main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of(scheme)
    main.open(1, answers[0])
    rows, token = answers[0].rows, answers[0].tokens[0]
    main.channel.send(Align(1, 0, token, 0, rows(0, 5), more=True))
    main.channel.send(Align(1, 0, token, 5, rows(5, 6), more=True))
    assert main.passes(1) == []
    main.channel.send(Align(1, 0, token, 6, rows(6, PROMPT_TOKENS)))
    assert main.passes(1) == [0]


@both
def test_a_late_join_predicts_as_if_it_had_followed(scheme: str, main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of(scheme)
    main.open(1, answers[0])
    for step in range(6):
        main.align(1, step)
    main.open(2, answers[0], first=3)
    assert main.passes(2) == []
    main.align(2, 3, kv_from=0)
    for step in (4, 5):
        main.align(2, step)
    assert main.passes(1) == [0, 1, 2, 3, 4, 5]
    assert main.passes(2) == [3, 4, 5]
    for step in (3, 4, 5):
        assert main.routes(2, step) == main.routes(1, step)


def test_a_late_join_between_alignments_goes_on_at_once(main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of()
    main.open(1, answers[0], token=4, kv=4, first=5, lookahead=2)
    assert main.passes(1) == []
    main.align(1, 5)
    assert main.passes(1) == [5, 6, 7]


@both
def test_two_requests_do_not_disturb_each_other(scheme: str, main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of(scheme)
    for alone in (1, 2):
        main.open(alone, answers[alone - 1])
        for step in range(4):
            main.align(alone, step)
        assert main.passes(alone) == [0, 1, 2, 3]
    main.open(3, answers[0])
    main.open(4, answers[1])
    for step in range(4):
        main.align(4, step)
        main.align(3, step)
    for number in (3, 4):
        assert main.passes(number) == [0, 1, 2, 3]
        for step in range(4):  # rows that are multiplied together are rounded otherwise
            together, alone = main.routes(number, step), main.routes(number - 2, step)
            assert [experts for experts, _ in together] == [experts for experts, _ in alone]
            for (_, mine), (_, own) in zip(together, alone, strict=True):
                assert mine == pytest.approx(own, abs=1e-3)


def test_one_that_runs_ahead_lets_others_in(main_of: Any, answers: list[MainAnswer]) -> None:
    """A request that waits for nothing has one pass a turn."""
    main = main_of()
    main.open(1, answers[0], token=0, kv=0, new=500, lookahead=500)
    main.open(2, answers[1], token=0, kv=0, new=4, lookahead=3)
    main.wait(lambda: sum(isinstance(m, Prediction) and m.request == 2 for m in main.got) == 24, "the second")
    main.channel.send(CloseRequest(1))
    assert sum(m.request == 1 for m in main.of(Prediction)) < 8 * 20


# --- wrong alignments -------------------------------------------------------------------------------------------------


def wrong_alignments(answer: MainAnswer) -> dict[str, list[Align]]:
    rows, token, end = answer.rows, answer.tokens[0], PROMPT_TOKENS

    def all_rows(change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Tensor, ...]:
        return tuple(Tensor(*tensor_bytes(change(t[:, :, :end]))) for t in answer.kv)

    whole = rows(0, end)
    torn = Tensor(whole[-1].dtype, whole[-1].shape, bytes(whole[-1].data)[:-4])
    return {
        "a layer short": [Align(1, 0, token, 0, whole[:-2])],
        "a tensor too many": [Align(1, 0, token, 0, (*whole, whole[0]))],
        "one head": [Align(1, 0, token, 0, all_rows(lambda t: t[:, :1]))],
        "half the dimension": [Align(1, 0, token, 0, all_rows(lambda t: t[..., :16]))],
        "no batch": [Align(1, 0, token, 0, all_rows(lambda t: t[0]))],
        "one row short": [Align(1, 0, token, 0, rows(0, end - 1))],
        "past the cache": [Align(1, 0, token, 0, rows(0, end + 1))],
        "beyond the cache": [Align(1, 0, token, end + 4, rows(0, 1))],
        "last part first": [Align(1, 0, token, 5, rows(5, end), more=True), Align(1, 0, token, 0, rows(0, 5))],
        "a hole": [Align(1, 0, token, 0, rows(0, 5), more=True), Align(1, 0, token, 7, rows(7, end))],
        "last tensor shorter": [Align(1, 0, token, 0, (*whole[:-1], rows(0, end - 1)[-1]))],
        "torn bytes": [Align(1, 0, token, 0, (*whole[:-1], torn))],
        "unknown dtype": [Align(1, 0, token, 0, tuple(Tensor("complex64", t.shape, t.data) for t in whole))],
        "token of another model": [Align(1, 0, 99_999, 0, whole)],
    }


WRONG = [
    "a layer short",
    "a tensor too many",
    "one head",
    "half the dimension",
    "no batch",
    "one row short",
    "past the cache",
    "beyond the cache",
    "last part first",
    "a hole",
    "last tensor shorter",
    "torn bytes",
    "unknown dtype",
    "token of another model",
]
BY_TRANSPORT = {"torn bytes", "unknown dtype", "token of another model"}  # the codec refuses the first two


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_alignment_is_named(name: str, main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of()
    main.open(1, answers[0])
    for message in wrong_alignments(answers[0])[name]:
        main.channel.send(message)
    main.wait(lambda: any(isinstance(m, Failed) for m in main.got), "a refusal")
    main.settle()
    (failure,) = main.of(Failed)
    assert failure.message.startswith("shadow: ")
    assert failure.error == "ProtocolError" or name in BY_TRANSPORT
    assert not [m for m in main.of(Prediction) if m.request == 1]
    main.open(2, answers[1])  # and the thread lives
    main.align(2, 0)
    assert main.passes(2) == [0]


def test_an_alignment_for_nobody_is_passed_over(main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of()
    main.channel.send(Align(77, 0, 5, 0, answers[0].rows(0, 4)))
    main.channel.send(CloseRequest(78))
    main.settle()
    assert main.of(Failed) == []

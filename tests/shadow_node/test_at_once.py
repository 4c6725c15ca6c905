"""The shadow departs at once: it runs ahead of a due alignment, and goes back where the alignment says otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.shadows.shadow_client import LAYERS, PROMPT_TOKENS, MainAnswer, ShadowClient
from wire.messages import Align, CloseRequest, Failed, Prediction

pytestmark = pytest.mark.timeout(90)


def followed_late(main: ShadowClient, answer: MainAnswer, steps: int, **opened: Any) -> list[list[set[int]]]:
    """What a shadow predicts that waits for every alignment."""
    main.open(90, answer, late=True, **opened)
    for step in range(steps):
        main.align(90, step)
        main.settle()
    found = [main.final(90, step) for step in range(steps)]
    main.channel.send(CloseRequest(90))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("token", "kv", "scheme"),
    [
        (1, 1, "int8"),
        (1, 0, "fp16"),
        (0, 1, "nf4"),
        (2, 3, "fp16"),
        (3, 1, "nf4"),
    ],
)
def test_what_stands_is_what_a_shadow_predicts_that_waits(
    token: int, kv: int, scheme: str, main_of: Any, answers: list[MainAnswer]
) -> None:
    """And its cache is the same, to the last bit."""
    main = main_of(scheme)
    steps = 7
    late = followed_late(main, answers[0], steps, token=token, kv=kv)
    main.open(1, answers[0], token=token, kv=kv, late=False)
    for step in range(steps):
        main.align(1, step)
        main.settle()
        assert main.final(1, step) == late[step]
    assert main.of(Failed) == []
    end = PROMPT_TOKENS + steps
    for mine, other in zip(main.cache(1), main.cache(90), strict=True):
        assert torch.equal(mine[:, :, :end], other[:, :, :end])


def test_it_is_ahead_of_one_due_alignment(main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of()
    main.open(1, answers[0], late=False, kv=0)
    main.settle()
    assert main.passes(1) == []  # prefill's loads need every slot
    for step in range(4):
        main.align(1, step)
        main.settle()
        assert main.predicted(1, step + 1)[:8] == LAYERS
        assert main.predicted(1, step + 2) == []


def test_the_same_token_alone_stands(main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of("fp16")  # its tokens are the main model's
    main.open(1, answers[0], late=False, kv=0)
    for step in range(6):
        main.align(1, step)
        main.settle()
    for step in range(6):
        assert main.predicted(1, step) == LAYERS


def test_another_token_is_read_at_once(main_of: Any, answers: list[MainAnswer]) -> None:
    """Every token is another one than the shadow expects: each pass is run twice, and says only what differs."""
    main = main_of()
    tokens = [(token + 7) % 2048 for token in answers[0].tokens]
    main.open(91, answers[0], kv=0, late=True)
    for step in range(5):
        main.align(91, step, token=tokens[step])
        main.settle()
    main.open(1, answers[0], kv=0, late=False)
    for step in range(5):
        main.align(1, step, token=tokens[step])
        main.settle()
        assert main.final(1, step) == main.final(91, step)
    found = [m for m in main.of(Prediction) if (m.request, m.position) == (1, PROMPT_TOKENS + 3)]
    assert [m.layer for m in found[:8]] == LAYERS
    again = found[8:]
    assert 0 < len(again) <= 8
    for message in again:
        assert set(message.experts) != set(found[message.layer].experts)


@pytest.mark.parametrize(
    ("layer", "other", "parts"),
    [(0, False, 1), (0, True, 2), (3, False, 2), (3, True, 1), (7, False, 1), (7, True, 2)],
)
def test_an_alignment_in_the_midst_of_the_pass(
    layer: int, other: bool, parts: int, main_of: Any, answers: list[MainAnswer]
) -> None:
    """The same token: the pass goes on with the main model's rows. Another: it ends there."""
    main = main_of("nf4")
    steps = 4
    token = {step: (t + 7 * other) % 2048 for step, t in enumerate(answers[0].tokens)}
    main.open(90, answers[0], late=True)
    for step in range(steps):
        main.align(90, step, token=token[step])
        main.settle()
    main.open(1, answers[0], late=False)
    sent = [0]

    def arrive(message: Prediction) -> None:
        step = message.position - PROMPT_TOKENS
        if message.request == 1 and message.layer == layer and step == sent[0] + 1 < steps:
            sent[0] = step
            main.align(1, step, parts=parts, token=token[step])

    main.on_prediction = arrive
    main.align(1, 0, token=token[0])
    main.settle()
    assert sent == [steps - 1]
    for step in range(steps):
        assert main.final(1, step) == main.final(90, step)
        found = main.predicted(1, step)
        assert found[: layer + 1] == LAYERS[: layer + 1]
    assert main.of(Failed) == []


def test_a_repetition_is_given_up_for_the_next_pass(main_of: Any, answers: list[MainAnswer]) -> None:
    """The next alignment comes before the repetition has predicted anything new: it comes with the first prediction of
    the pass after it, which runs ahead no more."""
    main = main_of("nf4")
    late = followed_late(main, answers[0], 6)
    main.open(1, answers[0], late=False)
    main.align(1, 0)
    main.settle()
    for step in range(1, 6):  # two at once: the first one's pass is done, and its repetition is not awaited
        main.align(1, step)
    main.settle()
    assert main.final(1, 5) == late[5]
    assert main.of(Failed) == []


def test_a_late_join_goes_on_at_once(main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of("fp16")
    late = followed_late(main, answers[0], 7)
    main.open(2, answers[0], first=3, late=False)
    main.settle()
    main.align(2, 3, kv_from=0)
    main.settle()
    for step in (4, 5, 6):
        main.align(2, step)
        main.settle()
    assert [main.final(2, step) for step in (3, 4, 5, 6)] == late[3:]


def test_requests_that_close_leave_the_others(main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of("fp16")
    late = followed_late(main, answers[0], 5)

    def close(message: Prediction) -> None:
        if (message.request, message.layer) == (2, 4):
            main.channel.send(CloseRequest(2))

    main.on_prediction = close
    for number in (1, 2, 3):
        main.open(number, answers[0], late=False)
    for step in range(5):
        for number in (1, 2, 3):
            main.align(number, step)
        main.settle()
        assert main.final(1, step) == main.final(3, step) == late[step]
    assert main.predicted(2, 0) == LAYERS[:5]


def test_a_wrong_alignment_of_a_pass_in_flight_is_named(main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of()
    main.open(1, answers[0], late=False)
    rows, token = answers[0].rows, answers[0].tokens[1]
    main.on_prediction = lambda m: (
        main.channel.send(Align(1, 1, token, 0, rows(0, 3)))
        if (m.request, m.position, m.layer) == (1, PROMPT_TOKENS + 1, 2)
        else None
    )
    main.align(1, 0)
    main.settle()
    failures = main.of(Failed)
    assert failures
    assert {failure.error for failure in failures} == {"ProtocolError"}
    main.on_prediction = lambda m: None
    main.open(2, answers[1], late=False)
    main.align(2, 0)
    main.settle()
    assert main.predicted(2, 0) == LAYERS

"""When the shadow may depart: after which alignments, and how far ahead."""

from __future__ import annotations

from typing import Any

import pytest

from support.shadows.shadow_client import STEPS, MainAnswer
from wire.messages import (
    Failed,
)

pytestmark = pytest.mark.timeout(90)
both = pytest.mark.parametrize("scheme", ["fp16", "nf4"])


@both
def test_periods_of_one_wait_for_every_alignment(scheme: str, main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of(scheme)
    main.open(1, answers[0], new=5)
    assert main.passes(1) == []
    for step in range(4):
        main.align(1, step)
        assert main.passes(1) == list(range(step + 1))
    main.align(1, 4)  # there is no fifth pass: the last token is not read
    assert main.passes(1) == [0, 1, 2, 3]
    assert main.of(Failed) == []


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
def test_never_aligned_runs_ahead_by_lookahead(lookahead: int, main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of()
    main.open(1, answers[0], token=0, kv=0, new=7, lookahead=lookahead)
    assert main.passes(1) == list(range(lookahead))  # before the first: as if pass -1 had been announced
    for step in range(8):
        main.align(1, step)
        assert main.passes(1) == list(range(min(6, step + 1 + lookahead)))


def test_a_period_of_four_waits_at_every_fourth(main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of()
    main.open(1, answers[0], token=4, kv=4, lookahead=9)
    assert main.passes(1) == []
    main.align(1, 0)
    assert main.passes(1) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        main.align(1, step)
    assert main.passes(1) == [0, 1, 2, 3]
    main.align(1, 4)
    assert main.passes(1) == list(range(8))
    assert main.of(Failed) == []


def test_lookahead_bounds_passes_between_alignments(main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of()
    main.open(1, answers[0], token=4, kv=0, lookahead=2)
    main.align(1, 0)
    assert main.passes(1) == [0, 1, 2]
    main.align(1, 1)
    assert main.passes(1) == [0, 1, 2, 3]


def test_token_and_kv_periods_are_their_own(main_of: Any, answers: list[MainAnswer]) -> None:
    """Token every 2, KV every 3: it waits at 0, 2, 3, 4, 6, 8 and nowhere else."""
    main = main_of()
    main.open(1, answers[0], token=2, kv=3, lookahead=9, new=STEPS + 1)
    seen = []
    for step in range(STEPS):
        main.align(1, step)
        seen.append(main.passes(1)[-1])
    assert seen == [1, 1, 2, 3, 5, 5, 7, 7, 8]
    assert main.of(Failed) == []


def test_a_single_token_answer_is_never_predicted(main_of: Any, answers: list[MainAnswer]) -> None:
    main = main_of()
    main.open(1, answers[0], token=0, kv=0, new=1, lookahead=5)
    assert main.passes(1) == []

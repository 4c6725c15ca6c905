"""When an alignment is due, against periods written out by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.alignment import Alignment
from scheduler.errors import ConfigError

DUE = {0: [], 1: [0, 1, 2, 3, 4, 5, 6, 7, 8], 2: [0, 2, 4, 6, 8], 3: [0, 3, 6], 4: [0, 4, 8], 8: [0, 8], 16: [0]}


def test_due() -> None:
    for token_period, kv_period in itertools.product(DUE, DUE):
        policy = Alignment(token_period, kv_period)
        assert [step for step in range(9) if policy.token_due(step)] == DUE[token_period]
        assert [step for step in range(9) if policy.kv_due(step)] == DUE[kv_period]
        assert [step for step in range(9) if policy.due(step)] == sorted({*DUE[token_period], *DUE[kv_period]})


def test_the_papers_best_setting_is_the_default() -> None:
    """Section 4.2: token and KV every decoding pass."""
    assert Alignment() == Alignment(token_period=1, kv_period=1)


@given(st.integers(1, 50), st.integers(0, 30))
def test_the_first_pass_is_aligned_and_then_one_in_each_period(period: int, start: int) -> None:
    policy = Alignment(period, 0)
    assert policy.token_due(0)
    assert sum(policy.token_due(step) for step in range(start, start + period)) == 1


@pytest.mark.parametrize(("token", "kv", "name"), [(-1, 1, "align-token is -1"), (1, -4, "align-kv is -4")])
def test_negative_periods_are_refused(token: int, kv: int, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}; allowed: 0"):
        Alignment(token, kv)

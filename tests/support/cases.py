"""Cases of a test of which the fast suite tries a few."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: all `cases`; those that are not in `fast` are slow.

    A tuple is a case of several parameters.
    """
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in fast else pytest.mark.slow)
        for case in cases
    ]


def fast_cover(first: Iterable[Any], *others: Iterable[Any]) -> list[Any]:
    """Parameters: every combination of a value of each. All are slow but a few that have every value of `first`, with
    the combinations of the `others` in turn: one for each `first`, or as many as there are such combinations."""
    firsts, rest = list(first), list(itertools.product(*others))
    fast = [(firsts[n % len(firsts)], *rest[n % len(rest)]) for n in range(max(len(firsts), len(rest)))]
    return slow_except(fast, ((one, *several) for one in firsts for several in rest))

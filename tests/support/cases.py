"""Cases of a test of which the fast suite tries a few."""

from __future__ import annotations

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

"""Families with every kind of RoPE scaling that their Transformers code knows, on both sides of the limits.

Every family with FAMILIES=all in the environment, else the tested ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models import families, ropes

pytestmark = pytest.mark.slow
LENGTH_MATTERS = ("dynamic", "longrope")


@pytest.mark.parametrize("kind", ropes.SCALED)
@pytest.mark.parametrize("family", families.FAMILIES if families.wants_every() else families.TESTED)
def test_answers_are_those_of_generate(family: str, kind: str, tmp_path: Path) -> None:
    try:
        scaled = ropes.make(tmp_path, family, kind)
    except ropes.NotMadeError as error:
        pytest.skip(f"not in Transformers: {error}")
    ropes.check(scaled, (0, ropes.CHUNK) if kind in LENGTH_MATTERS else (ropes.CHUNK,))

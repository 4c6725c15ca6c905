"""Each family with the kinds of RoPE scaling that depend on the length, and with one that does not, in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models import families, ropes

LENGTH_MATTERS = ("dynamic", "longrope")
FIXED = [kind for kind in ropes.SCALED if kind not in ("default", *LENGTH_MATTERS)]
"""Transformers alone applies these; tests/families has the default."""
CASES = [
    (family, kind)
    for number, family in enumerate(families.of(families.TESTED))
    for kind in (*LENGTH_MATTERS, FIXED[number % len(FIXED)])
]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_answers_are_those_of_generate(family: str, kind: str, tmp_path: Path) -> None:
    try:
        scaled = ropes.make(tmp_path, family, kind)
    except ropes.NotMadeError as error:
        pytest.skip(f"not in Transformers: {error}")
    ropes.check(scaled, (0, ropes.CHUNK) if kind in LENGTH_MATTERS else (ropes.CHUNK,))

"""Drafts on the emulated testbed: ratios are of the same turn."""

from __future__ import annotations

from typing import Any

from scripts.measure import drafts


def row(turn: int, case: str, rate: float) -> dict[str, Any]:
    return {"turn": turn, "case": case, "tokens_per_s": rate, "rows": 1.0, "accepted": None, "loads_a_token": 2.0}


def test_ratios_are_of_the_same_turn() -> None:
    rates = {"fully cached": (4.0, 8.0, 6.0), "no drafts": (2.0, 2.0, 2.0), "auto": (8.0, 8.0, 9.0)}
    rows = [row(turn, case, rate) | {"recall": None} for case, of in rates.items() for turn, rate in enumerate(of)]
    cached, none, auto = drafts.summary(rows)
    assert (cached["over_fully_cached"], none["over_fully_cached"]) == (1.0, 1 / 3)
    assert (auto["tokens_per_s"], auto["over_fully_cached"], auto["over_none"]) == (8.0, 1.5, 4.0)


def test_bad_text_is_compared_with_bad_text() -> None:
    rates = {"no drafts": 4.0, "bad text, no drafts": 2.0, "bad text, auto": 2.0}
    rows = [row(0, case, rate) | {"recall": None} for case, rate in rates.items()]
    found = {one["case"]: one for one in drafts.summary(rows)}
    assert found["bad text, auto"]["over_none"] == 1.0
    assert found["bad text, auto"]["over_fully_cached"] is None

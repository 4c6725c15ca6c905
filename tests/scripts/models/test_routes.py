"""Shares of choices beside those counted by hand, and a fit that finds what routes were drawn from."""

from __future__ import annotations

import pytest

from scheduler.simulation.route_model import RouteModel
from scripts.models import routes


def test_shares_are_those_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four experts of one layer, one a token; nothing is left out at the start."""
    monkeypatch.setattr(routes, "_COLD", 0)
    texts = [[[(0,), (0,), (1,), (0,)]], [[(1,), (2,), (2,), (1,)]]]
    found = routes.shares_of(texts, 4)
    # Last used: in the first text the second 0, and the last 0 after 1; in the second one the second 2, and 1 after 2.
    assert found.recent == (2 / 8, 4 / 8, 4 / 8)
    # The other text's ranks: of the first 1 and 2 (each twice, 1 came first), of the second 0, then 1.
    assert found.popular == (1 / 8, 3 / 8, 3 / 8)


@pytest.mark.slow
@pytest.mark.parametrize("model", [RouteModel(0.0, 1.0), RouteModel(3.0, 1.0), RouteModel(2.0, 4.0)])
def test_a_fit_finds_what_routes_were_drawn_from(model: RouteModel) -> None:
    texts = routes.drawn(model, 2, 8, 2, [400, 400, 400])
    found, shares = routes.fit(texts, 8, 2)
    assert shares.distance(routes.shares_of(texts, 8)) < 0.02
    assert found.skew == pytest.approx(model.skew, abs=0.5)
    assert found.repeat == pytest.approx(model.repeat, rel=0.25)


def test_texts_are_as_many_as_asked_of_each_kind() -> None:
    found = routes.texts_of(3)
    assert len(found) == 6
    assert all(text.startswith("Question:") for text in found[::2])

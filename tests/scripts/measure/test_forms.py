"""Which experts compute a prefill in int2, beside a plain count of rows."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.measure.forms import ByPopularity


class Still:
    """A model without layers, which is told nothing."""

    experts: ClassVar[dict[int, Any]] = {}

    def put(self, layer: int, expert: int, parameters: dict[str, torch.Tensor]) -> None: ...


@settings(deadline=None, max_examples=200)
@given(
    rows=st.dictionaries(st.integers(0, 15), st.integers(1, 40), min_size=1),
    share=st.integers(0, 20).map(lambda n: n / 20),
    least=st.booleans(),
)
def test_as_many_as_fit_the_share_from_one_end(rows: dict[int, int], share: float, least: bool) -> None:
    index = torch.tensor([expert for expert, count in rows.items() for _ in range(count)]).view(-1, 1)
    every: Any = {form: {0: [{}] * 16} for form in ("int4", "int2")}
    model: Any = Still()
    chooser = ByPopularity(model, every, share, least)
    chooser.choose(0, index)
    chosen = {expert for (_, expert), form in chooser.held.items() if form == "int2"}
    assert chooser.loads == {"int4": len(rows) - len(chosen), "int2": len(chosen)}
    total, inside = sum(rows.values()), sum(rows[expert] for expert in chosen)
    assert inside <= share * total + 1e-9
    left = [rows[expert] for expert in rows.keys() - chosen]
    if left:
        nearest = min(left) if least else max(left)
        assert inside + nearest > share * total - 1e-9
        ends = [rows[expert] for expert in chosen]
        assert all(count <= nearest for count in ends) if least else all(count >= nearest for count in ends)


@pytest.mark.parametrize("least", [True, False])
def test_no_share_is_int4_alone(least: bool) -> None:
    model: Any = Still()
    chooser = ByPopularity(model, {"int4": {0: [{}] * 2}, "int2": {0: [{}] * 2}}, 0.0, least)
    chooser.choose(0, torch.tensor([[0], [1], [1]]))
    assert chooser.loads == {"int4": 2, "int2": 0}

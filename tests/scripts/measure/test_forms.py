"""Which experts compute a prefill in int2, beside a plain count of rows."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.measure.forms import ByPopularity, search_columns, uniform_columns


class Still:
    """A model without layers, which is told nothing."""

    experts: ClassVar[dict[int, Any]] = {}

    def put(self, layer: int, expert: int, parameters: dict[str, torch.Tensor]) -> None: ...


@pytest.mark.slow
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


def test_forms_stand_beside_full_precision() -> None:
    rows: list[dict[str, Any]] = [
        {"form": "bfloat16", "expert_bytes": 2000, "perplexity": 20.0, "agreement": 1.0},
        {"form": "int2", "expert_bytes": 500, "perplexity": 25.0, "agreement": 0.5},
    ]
    shown = [[column.text(row) for column in uniform_columns(rows)] for row in rows]
    assert shown[1] == ["int2", "500", "25.0%", "25.0000", "25.00%", "50.00%"]
    assert shown[0][4] == "0.00%"


def test_shares_stand_beside_int4_alone() -> None:
    none = {"share": 0.0, "least_perplexity": 20.0, "most_perplexity": 20.0, "least_experts": 0.0, "most_experts": 0.0}
    some = {"share": 0.5, "least_perplexity": 21.0, "most_perplexity": 30.0, "least_experts": 0.8, "most_experts": 0.2}
    assert [column.text(some) for column in search_columns([none, some])] == [
        "50%",
        "80.0%",
        "5.00%",
        "20.0%",
        "50.00%",
    ]

"""A folder that holds a part of a store."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.held import HELD, held_text
from checkpoint.store import ExpertStore
from scheduler.errors import CorruptStoreError, NotHeldError
from scheduler.held import experts_of, ranges_of
from scheduler.types import ExpertId


@given(st.frozensets(st.builds(ExpertId, st.integers(0, 3), st.integers(0, 9))))
def test_ranges_are_few_and_lose_nothing(held: frozenset[ExpertId]) -> None:
    ranges = ranges_of(held)
    assert experts_of(ranges) == held
    starts = [one for one in held if (one.layer, one.expert - 1) not in held]
    assert len(ranges) == len(starts)


def test_part_names_what_it_holds(tiny_store: ExpertStore) -> None:
    assert ExpertStore.open(tiny_store.path).held is None
    held = {ExpertId(0, 0), ExpertId(0, 1), ExpertId(1, 2)}
    (tiny_store.path / HELD).write_text(held_text(held))
    part = ExpertStore.open(tiny_store.path)
    assert part.held == held
    assert part.locate(1, 2) == tiny_store.locate(1, 2)
    with pytest.raises(NotHeldError, match="does not hold expert 2 of layer 0; it holds 3 experts"):
        part.locate(0, 2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"experts": [[0, 1]]}',
        '{"experts": {"0": [[0]]}}',
        '{"experts": {"0": [["0", "1"]]}}',
        '{"experts": {"0": [[0, 3]]}}',
        '{"experts": {"0": [[2, 1]]}}',
        '{"experts": {"0": [[true, 1]]}}',
        '{"experts": {"2": [[0, 0]]}}',
        '{"experts": {"x": [[0, 0]]}}',
    ],
)
def test_damaged_list_is_refused(tiny_store: ExpertStore, text: str) -> None:
    (tiny_store.path / HELD).write_text(text)
    with pytest.raises(CorruptStoreError, match=HELD):
        ExpertStore.open(tiny_store.path)

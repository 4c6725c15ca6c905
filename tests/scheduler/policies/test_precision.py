"""Which form is asked for, and what an expert that is held in another is good for."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policies.baselines.hobbit import Mixed
from scheduler.policies.precision import (
    FULL,
    INT2,
    INT4,
    PREDICTED,
    Full,
    Importance,
    Popular,
    Precision,
    Uniform,
    form_taken,
    full_pays,
)
from scheduler.types import FormCost

BITS = {FULL: 16, INT4: 4, INT2: 2}


def wanted(
    rows: int = 1, share: float = 0.0, rank: int = 0, prefill: bool = False, better: float | None = None
) -> Importance:
    return Importance(prefill, rows == 0, rows, share, None, rank, better)


ANY = st.builds(
    wanted, st.integers(0, 5), st.floats(0, 0.99), st.integers(0, 7), st.booleans(), st.none() | st.floats(0, 1)
)


@pytest.mark.parametrize("choice", [Full(), Uniform(INT4), Uniform(INT2), Popular(), Popular(misses=INT2), Mixed()])
@given(asked=ANY)
def test_it_asks_for_its_forms_and_takes_what_has_as_many_bits(choice: Precision, asked: Importance) -> None:
    form = choice.form(asked)
    assert form in choice.forms
    assert [BITS[f] for f in choice.forms] == sorted((BITS[f] for f in choice.forms), reverse=True)
    assert choice.exact == (set(choice.forms) == {FULL})
    for held in choice.forms:
        assert choice.serves(held, asked) == (BITS[held] >= BITS[form])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.floats(0, 1))
def test_in_prefill_the_least_popular_with_at_most_that_share_of_the_rows_are_int2(
    rows: list[int], share: float
) -> None:
    rows = sorted(rows, reverse=True)
    total = sum(rows)
    before = [sum(rows[:i]) / total for i in range(len(rows))]
    forms = [Popular(share).form(wanted(n, s, prefill=True)) for n, s in zip(rows, before, strict=True)]
    assert forms == sorted(forms, key=lambda f: -BITS[f])  # never less for the more popular
    covered = sum(n for n, form in zip(rows, forms, strict=True) if form == INT2)
    assert covered <= share * total + 1e-6
    left = [n for n, form in zip(rows, forms, strict=True) if form == INT4]
    if left and share > 0:
        assert covered + left[-1] > share * total - 1e-6  # and as many as that


def test_in_decoding_every_expert_is_as_important_and_int2_from_prefill_is_loaded_again() -> None:
    fate = Popular(0.3)
    assert fate.form(wanted(1, 0.9)) == INT4
    assert fate.form(wanted(1, 0.9, prefill=True)) == INT2
    assert not fate.serves(INT2, wanted(1, 0.9))
    assert fate.serves(INT2, wanted(1, 0.9, prefill=True))
    assert not fate.serves(INT2, wanted(9, 0.0, prefill=True))
    assert fate.form(PREDICTED) == INT4  # nobody knows how popular
    assert fate.form(wanted(0, 0.9, prefill=True)) == INT2  # predicted to be unpopular


def test_a_misprefetched_expert_takes_int2_for_once() -> None:
    """Fate 5.3: "it uses the INT2 expert for fast temporary I/O in cases of misprefetch"."""
    fate = Popular(0.3, misses=INT2)
    assert fate.form(wanted(1)) == INT2, "a gate has chosen it, and nobody had brought it"
    assert fate.serves(INT4, wanted(1)), "a right prefetch is used as it is"
    assert fate.form(PREDICTED) == INT4
    assert not fate.serves(INT2, PREDICTED), "what is predicted later is brought in int4"
    assert fate.form(wanted(1, 0.0, prefill=True)) == INT4, "prefill is as before"


def test_no_share_is_int4_throughout_and_the_whole_share_int2_throughout_prefill() -> None:
    for n, s in product((1, 9), (0.0, 0.5, 0.99)):
        assert Popular(0).form(wanted(n, s, prefill=True)) == INT4
        assert Popular(1).form(wanted(n, s, prefill=True)) == INT2


# --- which form a worker takes ----------------------------------------------------------------------------------------


def costs(full: float, int4: tuple[float, float], int2: tuple[float, float], fits: str = "full int4 int2") -> list[Any]:
    return [
        FormCost(FULL, full, 0.0, "full" in fits),
        FormCost(INT4, *int4, "int4" in fits),
        FormCost(INT2, *int2, "int2" in fits),
    ]


@pytest.mark.parametrize(
    ("wanted", "known", "taken"),
    [
        (INT4, [], INT4),
        (INT4, costs(10, (3, 2), (2, 2)), INT4),  # precise enough, not the cheapest of all
        (INT2, costs(10, (3, 2), (2, 2)), INT2),
        (INT4, costs(10, (3, 8), (2, 2)), FULL),  # restoring takes longer than the smaller form saves
        (INT2, costs(10, (3, 2), (2, 4)), INT4),
        (INT4, costs(10, (3, 7), (2, 2)), FULL),  # no slower in full: more precise
        (INT2, costs(10, (3, 9), (2, 9)), FULL),
        (INT2, costs(10, (3, 9), (2, 9), fits="int4 int2"), INT2),  # slots too small for the full form
        (FULL, costs(10, (3, 2), (2, 2)), FULL),
        (FULL, costs(10, (3, 2), (2, 2), fits="int4 int2"), FULL),
    ],
)
def test_the_form_that_is_ready_first_of_those_as_precise(wanted: str, known: list[Any], taken: str) -> None:
    assert form_taken(wanted, known) == taken


TIMES = st.floats(0, 10)
ANY_COSTS = st.builds(costs, TIMES, st.tuples(TIMES, TIMES), st.tuples(TIMES, TIMES))


@given(st.sampled_from([FULL, INT4, INT2]), ANY_COSTS)
def test_no_form_is_taken_that_costs_more_than_it_saves(wanted: str, known: list[Any]) -> None:
    total = {cost.form: cost.load_s + cost.restore_s for cost in known}
    taken = form_taken(wanted, known)
    assert BITS[taken] >= BITS[wanted]
    assert total[taken] <= min(total[form] for form in BITS if BITS[form] >= BITS[wanted])
    assert taken == FULL or total[taken] < total[FULL]


@pytest.mark.parametrize(
    ("forms", "known", "pays"),
    [
        ((INT4, INT2), costs(10, (3, 8), (2, 1)), True),  # int4 is what most experts are loaded in
        ((INT4, INT2), costs(10, (3, 2), (2, 9)), False),
        ((FULL, INT4), costs(10, (3, 8), (2, 1)), True),
        ((INT2,), costs(10, (3, 8), (2, 1)), False),
        ((INT4,), costs(10, (3, 8), (2, 1), fits="int4"), True),  # slots for the full form are yet to be made
        ((FULL,), costs(10, (3, 2), (2, 1)), True),
    ],
)
def test_when_a_worker_loads_everything_in_full(forms: tuple[str, ...], known: list[Any], pays: bool) -> None:
    assert full_pays(forms, known) is pays

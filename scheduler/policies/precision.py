"""The form in which an expert is loaded and held in a slot: full precision, or a smaller one that loads faster."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from scheduler.types import FormCost

FULL = ""
"""The checkpoint's own precision."""
INT4 = "int4"
INT2 = "int2"
FORMS = (FULL, INT4, INT2)
"""All forms that a store may have, the largest first."""


class Importance(NamedTuple):
    """What is known of an expert when its load is about to begin."""

    prefill: bool
    predicted: bool
    """No gate has chosen it yet."""
    rows: int
    """Rows that chose it; 0 while it is only predicted."""
    share: float
    """The part of its layer's rows that more popular experts have; 0 for the most popular."""
    score: float | None
    """Its mean score among the rows that chose it. None: unknown."""
    rank: int
    """Its best rank among a row's choices, 0 for the first."""
    better: float | None = None
    """The part of a row's routing weight that the choices ranked before it have; the least of all rows that chose it.
    None: unknown."""


PREDICTED = Importance(False, True, 0, 0.0, None, 0)
"""An expert of a coming decode pass of which nothing more is known."""


class Precision(Protocol):
    """The form in which each expert is loaded."""

    @property
    def forms(self) -> tuple[str, ...]:
        """All forms that it may choose, the largest first. Slots have room for that one."""

    @property
    def exact(self) -> bool:
        """It chooses the full form only."""

    @property
    def wants_scores(self) -> bool:
        """It reads the gates' scores."""

    def form(self, importance: Importance) -> str:
        """The form in which to load the expert."""

    def serves(self, held: str, importance: Importance) -> bool:
        """Is an expert in a slot in form `held` good enough? If not, it is loaded again."""


class Full:
    """Every expert in the checkpoint's own precision."""

    forms: tuple[str, ...] = (FULL,)
    exact = True
    wants_scores = False

    def form(self, importance: Importance) -> str:
        return FULL

    def serves(self, held: str, importance: Importance) -> bool:
        return True


def suffices(held: str, form: str) -> bool:
    """Is an expert in form `held` at least as precise as one in `form`?"""
    return FORMS.index(held) <= FORMS.index(form)


def form_taken(wanted: str, costs: Iterable[FormCost]) -> str:
    """The form to load on a worker with these costs if `wanted` is precise enough.

    The one that is ready to compute first, of those in the worker's slots that are at least as precise; the most
    precise of equals. So a form that costs more to restore than it saves is not taken. `wanted` if costs are
    unknown.
    """
    enough = [cost for cost in costs if cost.fits and suffices(cost.form, wanted)]
    best = min(enough, key=lambda cost: (cost.load_s + cost.restore_s, FORMS.index(cost.form)), default=None)
    return wanted if best is None else best.form


def full_pays(forms: tuple[str, ...], costs: Iterable[FormCost]) -> bool:
    """Is the full form ready to compute at least as soon as the largest smaller one of `forms`?"""
    largest = next((form for form in forms if form != FULL), FULL)
    return form_taken(largest, [cost._replace(fits=True) for cost in costs if cost.form in (FULL, largest)]) == FULL


class Uniform:
    """Every expert in one form."""

    wants_scores = False

    def __init__(self, form: str) -> None:
        self.forms: tuple[str, ...] = (form,)
        self.exact = form == FULL

    def form(self, importance: Importance) -> str:
        return self.forms[0]

    def serves(self, held: str, importance: Importance) -> bool:
        return suffices(held, self.forms[0])


class Popular:
    """Fate's popularity-aware choice (4.5): int4 in decoding; in prefill int2 for the least popular experts of a layer.

    The int2 experts are as many as have at most the part `share` of the layer's rows together; rows are predicted ones
    if the gate has not fired. In decoding all experts are equally important, so one that is held in int2 since
    prefill is loaded again.

    Assumed: the share is one of rows (as in the paper's Figs 9 and 10), not of experts. It is 5 %, the result of the
    paper's search for a share that costs at most 1 %, on models/demo-moe (`scripts/measure/forms.py`). An expert that
    turns out to be more popular than predicted is loaded again.

    `misses`: the form of an expert whose load begins after a decoding gate has chosen it, since nobody had predicted it
    or its prefetch had not begun. int2 is Fate's "fast temporary I/O in cases of misprefetch" on its low-end PC (5.3);
    by 4.5 decoding takes int4 only. It is temporary: a prediction loads the expert again, in int4.
    """

    exact = False
    wants_scores = False
    forms: tuple[str, ...] = (INT4, INT2)

    def __init__(self, share: float = 0.05, misses: str = INT4) -> None:
        self.share = share
        self.misses = misses

    def form(self, importance: Importance) -> str:
        if not importance.prefill:
            return INT4 if importance.predicted else self.misses
        return INT2 if importance.share >= 1 - self.share and self.share > 0 else INT4

    def serves(self, held: str, importance: Importance) -> bool:
        return suffices(held, self.form(importance))

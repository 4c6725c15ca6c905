"""In which form an expert's bytes travel and lie in a slot: full precision, or one that loads faster."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from scheduler.errors import ConfigError

FULL = ""
"""As the checkpoint has it."""
INT4 = "int4"
INT2 = "int2"
FORMS = (FULL, INT4, INT2)
"""All that a store may have, the largest first."""


class Importance(NamedTuple):
    """A load is about to begin. `rows`: how many rows want the expert, 0 while it is only predicted. `share`: the part
    of its layer's rows that experts more wanted than it have, from 0 for the most wanted. `score`: its mean score among
    the rows that chose it, None where nobody said. `rank`: its place among a token's choices, 0 for the best.
    `better`: the part of a row's routing weight that the choices before it have, of all rows that chose it the least;
    None where nobody said."""

    prefill: bool
    predicted: bool
    rows: int
    share: float
    score: float | None
    rank: int
    better: float | None = None


PREDICTED = Importance(False, True, 0, 0.0, None, 0)
"""Of a decode pass to come, and nothing more is known."""


class Precision(Protocol):
    """`forms`: all that it may ask for, the largest first; slots have room for that. `exact`: the full form alone."""

    @property
    def forms(self) -> tuple[str, ...]: ...

    @property
    def exact(self) -> bool: ...

    @property
    def wants_scores(self) -> bool: ...

    def form(self, importance: Importance) -> str: ...

    def serves(self, held: str, importance: Importance) -> bool:
        """Is an expert in a slot in form `held` good enough, or is it to be loaded again?"""


class Full:
    """Every expert as the checkpoint has it."""

    forms: tuple[str, ...] = (FULL,)
    exact = True
    wants_scores = False

    def form(self, importance: Importance) -> str:
        return FULL

    def serves(self, held: str, importance: Importance) -> bool:
        return True


def _suffices(held: str, form: str) -> bool:
    return FORMS.index(held) <= FORMS.index(form)


def _known(form: str) -> str:
    """Raises ConfigError."""
    if form not in FORMS:
        raise ConfigError(f"a form of experts is {form!r}; allowed: {', '.join(map(repr, FORMS))}")
    return form


class Uniform:
    """Every expert in one form, whoever wants it."""

    wants_scores = False

    def __init__(self, form: str) -> None:
        self.forms: tuple[str, ...] = (_known(form),)
        self.exact = form == FULL

    def form(self, importance: Importance) -> str:
        return self.forms[0]

    def serves(self, held: str, importance: Importance) -> bool:
        return _suffices(held, self.forms[0])


class Popular:
    """Fate's popularity-aware choice (4.5): int4; in prefill, int2 for the least popular experts of a layer, as many as
    have at most the part `share` of its rows together, predicted rows where the gate has not fired. In decoding every
    expert is as important: int4 only, and one that is held in int2 since prefill is loaded again.

    Assumed: the proportion is one of rows (as in the paper's Figs 9 and 10), not of experts, and 5 % where nobody says:
    what its search for the proportion that costs at most 1 % found on models/demo-moe (`scripts/measure/forms.py`). One
    that turns out to be more popular than predicted is loaded again.
    """

    exact = False
    wants_scores = False
    forms: tuple[str, ...] = (INT4, INT2)

    def __init__(self, share: float = 0.05) -> None:
        if not 0 <= share <= 1:
            raise ConfigError(f"popular precision: the share of rows in int2 is {share}; allowed: 0 to 1")
        self.share = share

    def form(self, importance: Importance) -> str:
        unpopular = importance.prefill and importance.share >= 1 - self.share
        return INT2 if unpopular and self.share > 0 else INT4

    def serves(self, held: str, importance: Importance) -> bool:
        return _suffices(held, self.form(importance))


class Mixed:
    """HOBBIT's token-level choice: an expert is fetched in the form `low` where the choices before it already have more
    than `threshold` of their row's weight ("unimportance"), in `high` elsewhere; a row's best is always `high`.

    Several rows: the one that needs it most decides. Where nobody says what the better choices weigh (an expert that is
    only predicted): by its place, the best `high`, the others `low`; one held in `low` that then turns out to matter is
    loaded again. Assumed: in prefill as in decoding; what HOBBIT skips altogether (over 0.9) is fetched in `low`, since
    skipping is a router's to do.
    """

    exact = False
    wants_scores = True

    def __init__(self, threshold: float = 0.6, high: str = FULL, low: str = INT4) -> None:
        if not 0 <= threshold <= 1:
            raise ConfigError(f"mixed precision: threshold is {threshold}; allowed: 0 to 1")
        if FORMS.index(_known(high)) >= FORMS.index(_known(low)):
            raise ConfigError(f"mixed precision: {high!r} is to be the larger form of the two, {low!r} the smaller")
        self.threshold = threshold
        self.forms: tuple[str, ...] = (high, low)

    def form(self, importance: Importance) -> str:
        high, low = self.forms
        if importance.better is None:
            return high if importance.rank == 0 else low
        return high if importance.better <= self.threshold else low

    def serves(self, held: str, importance: Importance) -> bool:
        return _suffices(held, self.form(importance))

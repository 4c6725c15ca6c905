"""As much of PromQL as the dashboard's queries need, evaluated at the last of a few scrapes of one target.

Stricter than Prometheus, where a mistake would give an empty graph: a metric that no scrape has, a label that a metric
does not have, a rate of what is no counter, a quantile of what has no buckets are errors.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]
"""Sorted, without the metric's name."""
Vector = dict[Labels, float]
Value = Vector | float

TOKEN = re.compile(r'\s*([A-Za-z_:][\w:]*|\d+(?:\.\d+)?[smhd]?|"[^"]*"|=~|!~|!=|>=|<=|==|[-+*/(){}\[\],=<>])')
AGGREGATIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "max": max,
    "min": min,
    "avg": lambda values: sum(values) / len(values),
    "count": len,
}
LIKE = ("counter", "histogram")
"""Types of families whose samples only rise."""


class QueryError(ValueError):
    """A query that Prometheus would refuse, or that could never give anything."""


@dataclass(frozen=True)
class Scrape:
    """One scrape, as Prometheus stores it: with the labels of its target."""

    time: float
    samples: dict[str, Vector]
    """By the sample's name."""
    types: dict[str, str]
    """Sample's name -> type of its family."""


def scrape(time: float, body: str, **target: str) -> Scrape:
    """`target`: labels that Prometheus adds, as job and instance."""
    samples: dict[str, Vector] = defaultdict(dict)
    types: dict[str, str] = {}
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            samples[sample.name][tuple(sorted({**sample.labels, **target}.items()))] = sample.value
            types[sample.name] = family.type
    return Scrape(time, dict(samples), types)


@dataclass(frozen=True)
class _Range:
    """What a selector with `[...]` selects: what rose, and in how many seconds."""

    name: str
    rise: Vector
    seconds: float


class Query:
    """`names`: metrics that it has read."""

    def __init__(self, text: str, scrapes: Sequence[Scrape]) -> None:
        self._scrapes, self._last = scrapes, scrapes[-1]
        self._tokens = self._split(text)
        self._at = 0
        self.names: set[str] = set()

    def result(self) -> Value:
        found = self._sum()
        if self._at < len(self._tokens):
            raise QueryError(f"{self._tokens[self._at]!r} is too much")
        return _instant(found)

    # --- tokens -------------------------------------------------------------------------------------------------

    @staticmethod
    def _split(text: str) -> list[str]:
        tokens, at = [], 0
        while at < len(text.rstrip()):
            found = TOKEN.match(text, at)
            if found is None:
                raise QueryError(f"cannot be read from here: {text[at:]!r}")
            tokens.append(found[1])
            at = found.end()
        return tokens

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, wanted: str | None = None) -> str:
        token = self._peek()
        if not token or (wanted is not None and token != wanted):
            raise QueryError(f"{token or 'the end'!r} where {wanted or 'more'!r} should be")
        self._at += 1
        return token

    def _list(self, end: str, item: Callable[[], object]) -> None:
        while self._peek() != end:
            item()
            if self._peek() != end:
                self._take(",")
        self._take(end)

    # --- expressions --------------------------------------------------------------------------------------------

    def _sum(self) -> Value | _Range:
        left = self._product()
        while self._peek() in ("+", "-"):
            left = _combined(self._take(), _instant(left), _instant(self._product()))
        return left

    def _product(self) -> Value | _Range:
        left = self._unary()
        while self._peek() in ("*", "/"):
            left = _combined(self._take(), _instant(left), _instant(self._unary()))
        return left

    def _unary(self) -> Value | _Range:
        token = self._take()
        if token == "(":
            inner = self._sum()
            self._take(")")
            return inner
        if token[0].isdigit():
            return float(token)
        if token in AGGREGATIONS:
            return self._aggregated(token)
        if self._peek() == "(":
            return self._called(token)
        return self._selected(token)

    def _aggregated(self, name: str) -> Vector:
        by = self._labels() if self._peek() == "by" else None
        self._take("(")
        vector = _vector(_instant(self._sum()))
        self._take(")")
        if by is None and self._peek() == "by":
            by = self._labels()
        groups: dict[Labels, list[float]] = defaultdict(list)
        for labels, value in vector.items():
            missing = set(by or ()) - {label for label, _ in labels}
            if missing:
                raise QueryError(f"{name} by {missing}, which {dict(labels)} does not have")
            groups[tuple(pair for pair in labels if pair[0] in (by or ()))].append(value)
        return {labels: AGGREGATIONS[name](values) for labels, values in groups.items()}

    def _labels(self) -> list[str]:
        found: list[str] = []
        self._take("by")
        self._take("(")
        self._list(")", lambda: found.append(self._take()))
        return found

    def _called(self, name: str) -> Vector:
        arguments: list[Value | _Range] = []
        self._take("(")
        self._list(")", lambda: arguments.append(self._sum()))
        if name in ("rate", "increase") and len(arguments) == 1:
            return self._risen(name, arguments[0])
        if name == "histogram_quantile" and len(arguments) == 2 and isinstance(arguments[0], float):
            return _quantiles(arguments[0], _vector(_instant(arguments[1])))
        raise QueryError(f"{name} of {len(arguments)} arguments")

    def _risen(self, name: str, what: Value | _Range) -> Vector:
        if not isinstance(what, _Range):
            raise QueryError(f"{name} needs a range, as [5m]")
        if self._last.types[what.name] not in LIKE:
            raise QueryError(f"{name} of {what.name}, which is a {self._last.types[what.name]}")
        over = what.seconds if name == "rate" else 1.0
        return {labels: value / over for labels, value in what.rise.items()}

    def _selected(self, name: str) -> Vector | _Range:
        self.names.add(name)
        if name not in self._last.samples:
            raise QueryError(f"no scrape has {name}")
        found = self._last.samples[name]
        if self._peek() == "{":
            self._take()
            wanted: list[tuple[str, str, str]] = []
            self._list("}", lambda: wanted.append((self._take(), self._take(), self._take().strip('"'))))
            for one in wanted:
                found = _matched(name, found, *one)
        if self._peek() != "[":
            return found
        self._take()
        if not re.fullmatch(r"\d+[smhd]", self._take()):
            raise QueryError(f"the range of {name} has no unit")
        self._take("]")
        first = self._scrapes[0]
        before = first.samples.get(name, {})
        rise = {labels: value - before[labels] for labels, value in found.items() if labels in before}
        return _Range(name, rise, self._last.time - first.time)


def _matched(name: str, vector: Vector, label: str, how: str, value: str) -> Vector:
    if not any(label in dict(labels) for labels in vector):
        raise QueryError(f"no {name} has the label {label}")
    if how not in ("=", "!=", "=~", "!~"):
        raise QueryError(f"{how!r} compares no labels")
    wanted = re.compile(value if "~" in how else re.escape(value))

    def fits(labels: Labels) -> bool:
        return bool(wanted.fullmatch(dict(labels).get(label, ""))) is not how.startswith("!")

    return {labels: number for labels, number in vector.items() if fits(labels)}


def _instant(found: Value | _Range) -> Value:
    if isinstance(found, _Range):
        raise QueryError(f"a range of {found.name} where its value should be")
    return found


def _vector(found: Value) -> Vector:
    if isinstance(found, float):
        raise QueryError(f"the number {found} where a vector should be")
    return found


def _combined(how: str, left: Value, right: Value) -> Value:
    if isinstance(left, float) and isinstance(right, float):
        return _number(how, left, right)
    if isinstance(right, float):
        return {labels: _number(how, value, right) for labels, value in _vector(left).items()}
    if isinstance(left, float):
        return {labels: _number(how, left, value) for labels, value in right.items()}
    if left and right and not left.keys() & right.keys():
        raise QueryError(f"no series has the same labels on both sides of {how!r}")
    return {labels: _number(how, value, right[labels]) for labels, value in left.items() if labels in right}


def _number(how: str, left: float, right: float) -> float:
    if how == "/":
        return left / right if right else math.nan
    return {"+": left + right, "-": left - right, "*": left * right}[how]


def _quantiles(share: float, buckets: Vector) -> Vector:
    """As Prometheus: linear within the bucket in which the quantile lies."""
    groups: dict[Labels, list[tuple[float, float]]] = defaultdict(list)
    for labels, count in buckets.items():
        bound = dict(labels).get("le")
        if bound is None:
            raise QueryError(f"a quantile of {dict(labels)}, which has no le")
        groups[tuple(pair for pair in labels if pair[0] != "le")].append((float(bound), count))
    return {labels: _quantile(share, sorted(found)) for labels, found in groups.items()}


def _quantile(share: float, buckets: list[tuple[float, float]]) -> float:
    if not math.isinf(buckets[-1][0]):
        raise QueryError("a quantile of buckets without +Inf")
    rank = share * buckets[-1][1]
    if not rank:
        return math.nan
    lower, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    raise AssertionError("unreachable: the last bucket has every sample")

"""Answers beside Transformers': tokens, and the logits that chose them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch

ROUNDING = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest difference between two logits that rounding explains, over the largest logit: about 80 units in the last
place of float32, 4 of the others, whose products are summed in float32."""


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and the logits [V] float32 that chose each. `logits` is None if they were not seen."""

    tokens: list[int]
    logits: list[torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token that is another one. `logits`: the two best of Transformers. `near_tie`: they differ by no more
    than rounding does."""

    position: int
    token: int
    reference: int
    logits: tuple[float, float]
    near_tie: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """One answer beside Transformers'. Logits are compared as long as both answers are the same."""

    tokens: int
    equal_tokens: int
    """Before the first that differs."""
    logits: int
    bit_equal_logits: int
    logit_difference: float
    """The largest between two logits, over the largest logit."""
    difference: Difference | None
    rounding: float
    finite: bool
    """False if a logit is infinite or NaN and that of Transformers is not, after a first difference too."""

    @property
    def exact(self) -> bool:
        return self.finite and self.difference is None and self.logit_difference <= self.rounding


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of all answers. `verdict`: exact, approximate (the system changes answers by design) or different.

    No system may answer with logits that are not finite: those are different, whatever the system.
    """

    model: str
    system: str
    cluster: str
    dtype: str
    device: str
    """Of Transformers' model, as torch names it: that of the main node."""
    approximate: str
    """Why answers may differ by design; empty if they may not."""
    prompts: list[Comparison]
    weights: list[str] = field(default_factory=list)
    """Weights of the store that are not the checkpoint's, in words. Transformers had them, too."""

    @property
    def verdict(self) -> str:
        if self.approximate and all(one.finite for one in self.prompts):
            return "approximate"
        return "exact" if all(one.exact for one in self.prompts) else "different"


def compare(got: Answer, wanted: Answer, dtype: str) -> Comparison:
    """`wanted`: Transformers' answer, with logits."""
    if wanted.logits is None or len(got.tokens) != len(wanted.tokens):
        raise ValueError(f"{len(got.tokens)} tokens beside {len(wanted.tokens)} of the reference, or no logits of it")
    for answer in (got, wanted):
        if answer.logits is not None and len(answer.logits) != len(answer.tokens):
            raise ValueError(f"{len(answer.logits)} logits of {len(answer.tokens)} tokens")
    rounding = ROUNDING[dtype]
    pairs = enumerate(zip(got.tokens, wanted.tokens, strict=True))
    first = next((n for n, (token, reference) in pairs if token != reference), None)
    difference = None
    if first is not None:
        best, second = wanted.logits[first].topk(2).values.tolist()
        near = best - second <= rounding * float(wanted.logits[first].abs().max())
        difference = Difference(first, got.tokens[first], wanted.tokens[first], (best, second), near)
    pairs_of_logits = [] if got.logits is None else list(zip(got.logits, wanted.logits, strict=True))
    seen = pairs_of_logits[: None if first is None else first + 1]
    apart = max((_apart(a, b) for a, b in seen), default=0.0)
    return Comparison(
        tokens=len(wanted.tokens),
        equal_tokens=len(wanted.tokens) if first is None else first,
        logits=len(seen),
        bit_equal_logits=sum(torch.equal(a, b) for a, b in seen),
        logit_difference=apart,
        difference=difference,
        rounding=rounding,
        finite=isfinite(apart) and all(_is_finite(a, b) for a, b in pairs_of_logits),
    )


def _apart(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference over the largest finite logit; infinite if one is no number and the other is."""
    if torch.equal(logits, reference):
        return 0.0
    finite = reference.isfinite()
    if not torch.equal(logits[~finite], reference[~finite]) or not logits[finite].isfinite().all():
        return float("inf")
    return float((logits - reference)[finite].abs().max() / reference[finite].abs().max().clamp_min(1e-30))


def _is_finite(logits: torch.Tensor, reference: torch.Tensor) -> bool:
    return bool(logits[reference.isfinite()].isfinite().all())


def as_dict(verdict: Verdict) -> dict[str, Any]:
    """What --json prints."""
    return {"verdict": verdict.verdict, **dataclasses.asdict(verdict)}

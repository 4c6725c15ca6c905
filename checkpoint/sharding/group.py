"""Checkpoint tensors of experts that become one parameter, and whether they can be read an expert at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from checkpoint.place import Place

_ALONG_ROWS = ("Concatenate", "Chunk", "Transpose")


@dataclass(frozen=True)
class Group:
    """Checkpoint tensors that one rule makes into one parameter, in the rule's order."""

    places: dict[str, Place]
    converter: Any
    dequantising: frozenset[str] = frozenset()
    """Class names of operations that dequantise, and keep dimension 0 as it is."""

    @property
    def dequantises(self) -> bool:
        return any(map(dequantises, getattr(self.converter, "operations", ())))

    @property
    def stacks(self) -> bool:
        """Whether each tensor is one expert's."""
        rules = list(getattr(self.converter, "operations", ()))
        rules = rules[1:] if rules and dequantises(rules[0]) else rules
        return bool(rules) and type(rules[0]).__name__ == "MergeModulelist" and rules[0].dim == 0

    def experts(self, first: int, last: int, count: int) -> dict[str, Place] | None:
        """The tensors of experts first..last - 1 of `count`; None if they cannot be separated.

        They can if each tensor is one expert's and the rule stacks them, or if a tensor has an expert in each row and
        no operation of the rule touches that dimension. An operation that dequantises comes before all others, and
        takes each tensor for itself.
        """
        rules = list(self.converter.operations) if self.converter else []
        first_rule = rules.pop(0) if rules and dequantises(rules[0]) else None
        stacks = self.stacks
        if not all(_leaves_rows(rule) for rule in rules[1 if stacks else 0 :]):
            return None
        if stacks:
            return dict(list(self.places.items())[first:last]) if len(self.places) == count else None
        if first_rule is not None and type(first_rule).__name__ not in self.dequantising:
            return None
        held = list(self.places.items())
        if len(held) != 1 or not held[0][1].shape or held[0][1].shape[0] != count:
            return None
        return {held[0][0]: held[0][1].rows(first, last)}


def dequantises(rule: Any) -> bool:
    return getattr(rule, "hf_quantizer", None) is not None


def _leaves_rows(rule: Any) -> bool:
    if type(rule).__name__ not in _ALONG_ROWS:
        return False
    dims = [value for name, value in vars(rule).items() if name in ("dim", "dim0", "dim1")]
    return bool(dims) and all(isinstance(dim, int) and dim >= 1 for dim in dims)

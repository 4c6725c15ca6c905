"""The published numbers and scales of experts' parameters, arranged as a family's rule arranges what it dequantises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from checkpoint.formats.unreadable import DAMAGED, is_out_of_memory, unreadable
from checkpoint.native.encoding import CODES, SCALES, Parts, Unencodable
from checkpoint.sharding.group import Group
from checkpoint.sharding.plan import Plan

AS_THEY_ARE = {"mxfp4": ("_blocks", "_scales"), "fp8": ("", "_scale_inv"), "mxfp8": ("", "_scale_inv")}
"""How the names of a weight's numbers and scales end, in formats whose tensors are kept as they are."""

Tensors = dict[str, torch.Tensor]


Groups = Mapping[str | None, Group]
_Listed = dict[str, dict[str, list[torch.Tensor]]]
"""Of each part, by the rule's pattern: a tensor an expert, or one of all."""


def published_parts(plan: Plan, target: str, groups: Groups, tensors: Tensors) -> Parts:
    """The parts of the parameter `target` of some experts, each [n, ...].

    `groups`: its tensors, by the rule's patterns. Raises Unencodable.
    """
    rule: Any = next(iter(groups.values())).converter
    if plan.format is None or rule is None or not hasattr(rule.operations[0], "hf_quantizer"):
        raise Unencodable(f"{target} has no rule that dequantises it")
    held = {}
    for pattern, group in groups.items():
        found = [name for name in group.places if name in tensors]
        if pattern is None or not found:
            raise Unencodable(f"{target} has tensors without a rule")
        held[pattern] = found
    listed = (_as_they_are if plan.format.name in AS_THEY_ARE else _by_weight)(plan, target, held, tensors)
    return {part: _arranged(plan, target, rule, patterns) for part, patterns in listed.items()}


def _as_they_are(plan: Plan, target: str, held: dict[str, list[str]], tensors: Tensors) -> _Listed:
    """Tensors of numbers and tensors of scales, as they are."""
    ends = AS_THEY_ARE[plan.format.name if plan.format else ""]
    found: _Listed = {CODES: {}, SCALES: {}}
    for pattern, names in held.items():
        some = [tensors[name] for name in names]
        dtypes = {one.dtype for one in some}
        if len(dtypes) > 1:
            raise Unencodable(f"{pattern} is in {' and '.join(sorted(map(str, dtypes)))}")
        raw = [one.view(torch.uint8) if one.itemsize == 1 else one for one in some]
        if pattern.endswith(ends[1]):
            found[SCALES][pattern.removesuffix(ends[1]) + ends[0]] = raw
        elif pattern.endswith(ends[0]) and some[0].dtype in (torch.uint8, torch.float8_e4m3fn):
            found[CODES][pattern] = raw
        elif not pattern.endswith("activation_scale"):
            raise Unencodable(f"{some[0].dtype} in {pattern}")
    if found[CODES].keys() != found[SCALES].keys():
        raise Unencodable(f"{target} has other scales than numbers")
    return found


def _by_weight(plan: Plan, target: str, held: dict[str, list[str]], tensors: Tensors) -> _Listed:
    """What the format makes of the tensors of each expert's weight."""
    weights: dict[str, dict[str, list[torch.Tensor]]] = {}
    for pattern, names in held.items():
        word = plan.words.get(names[0])
        if word is None or not pattern.endswith(word):
            raise Unencodable(f"{pattern} is not quantised")
        weights.setdefault(pattern.removesuffix(word), {})[word] = [tensors[name] for name in names]
    found: _Listed = {}
    for stem, words in weights.items():
        if len({len(some) for some in words.values()}) > 1:
            raise Unencodable(f"{target} has experts without some of {', '.join(words)}")
        for one in zip(*words.values(), strict=True):
            parts = published_weight(plan, target, dict(zip(words, one, strict=True)))
            for part, tensor in parts.items():
                found.setdefault(part, {}).setdefault(f"{stem}weight", []).append(tensor)
    counts = {len(tensors) for patterns in found.values() for tensors in patterns.values()}
    if len(counts) > 1 or any(len(patterns) != len(weights) for patterns in found.values()):
        raise Unencodable(f"{target} has matrices with other parts than others")
    return found


def published_weight(plan: Plan, target: str, parts: Tensors) -> Parts:
    """What the format makes of the tensors of one weight, by its words. Raises Unencodable, DoesNotFitError."""
    if plan.format is None:
        raise Unencodable(f"{target} is not quantised")
    try:
        return plan.format.published(plan.quantizer, parts, target)
    except (*DAMAGED, RuntimeError, AssertionError, MemoryError) as error:
        if isinstance(error, Unencodable):
            raise
        if is_out_of_memory(error):
            raise unreadable(f"{plan.source.path}: {target} cannot be stored as published", error) from error
        raise Unencodable(f"{target} has parts that are not those of {plan.format.name} ({error})") from error


def _arranged(plan: Plan, target: str, rule: Any, parts: dict[str, Any]) -> torch.Tensor:
    found = parts
    try:
        for operation in rule.operations[1:]:
            found = operation.convert(
                found,
                source_patterns=rule.source_patterns,
                target_patterns=rule.target_patterns,
                full_layer_name=target,
                model=plan.model,
                config=plan.model.config,
            )
    except (ValueError, RuntimeError, TypeError, KeyError, AttributeError) as error:
        if is_out_of_memory(error):
            raise unreadable(f"{plan.source.path}: {target} cannot be stored as published", error) from error
        raise Unencodable(f"its family's rule for {target} is not for published numbers ({error})") from error
    (value,) = found.values()
    if isinstance(value, list):
        (value,) = value
    result: torch.Tensor = value
    return result

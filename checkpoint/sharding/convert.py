"""A checkpoint's expert weights as a family's own parameters, a few experts at a time; Transformers converts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from checkpoint import family
from checkpoint.sharding.source import Source
from checkpoint.sharding.weights import Place, places
from scheduler.errors import CorruptCheckpointError, MissingShardError

_PART_BYTES = 1 << 25
_ALONG_ROWS = ("Concatenate", "Chunk", "Transpose")


@dataclass(frozen=True)
class Group:
    """Checkpoint tensors that one rule makes into one parameter, in the rule's order."""

    places: dict[str, Place]
    converter: Any

    def experts(self, first: int, last: int, count: int) -> dict[str, Place] | None:
        """The tensors of experts first..last - 1 of `count`; None if they cannot be separated.

        They can if each tensor is one expert's and the rule stacks them, or if a tensor has an expert in each row and
        no operation of the rule touches that dimension.
        """
        rules = list(self.converter.operations) if self.converter else []
        stacks = bool(rules) and type(rules[0]).__name__ == "MergeModulelist" and rules[0].dim == 0
        if not all(_leaves_rows(rule) for rule in rules[1 if stacks else 0 :]):
            return None
        if stacks:
            return dict(list(self.places.items())[first:last]) if len(self.places) == count else None
        held = list(self.places.items())
        if len(held) != 1 or not held[0][1].shape or held[0][1].shape[0] != count:
            return None
        return {held[0][0]: held[0][1].rows(first, last)}


def _leaves_rows(rule: Any) -> bool:
    if type(rule).__name__ not in _ALONG_ROWS:
        return False
    dims = [value for name, value in vars(rule).items() if name in ("dim", "dim0", "dim1")]
    return bool(dims) and all(isinstance(dim, int) and dim >= 1 for dim in dims)


@dataclass(frozen=True)
class Part:
    """Experts first..last - 1 of one MoE layer and their bytes in the checkpoint. A `whole` part cannot be divided."""

    layer: int
    first: int
    last: int
    places: dict[str, Place]
    whole: bool = False


class Conversion:
    """Which tensors of a checkpoint make up the experts of which layer, and which are the dense rest."""

    def __init__(self, source: Source, model: Any) -> None:
        """Raises MissingShardError, CorruptCheckpointError, NotMoEError. Reads headers only."""
        self.source = source
        self.model = model
        self.modules = family.experts_modules(model)
        self.parameters = {
            layer: {key: value.detach() for key, value in family.expert_parameters(name, module).items()}
            for layer, (name, module) in self.modules.items()
        }
        self.places = places(source)
        self.groups: dict[int, dict[tuple[str, str | None], Group]] = {layer: {} for layer in self.modules}
        self._sort()
        experts = {key for layer in self.groups.values() for group in layer.values() for key in group.places}
        self.dense = {key: place for key, place in self.places.items() if key not in experts}
        for layer, groups in self.groups.items():
            if not groups and self.parameters[layer]:
                raise MissingShardError(
                    f"{source.path} holds no expert weights for layer {layer}, its configuration does"
                )
        self.groups = {layer: groups for layer, groups in self.groups.items() if groups}

    def _sort(self) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        mapping = get_model_conversion_mapping(self.model)
        renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        converters = [m for m in mapping if isinstance(m, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        state = self.model.state_dict()
        owner = {f"{self.modules[n][0]}.{key}": n for n, held in self.parameters.items() for key in held}
        for key in sorted(self.places, key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, self.model.base_model_prefix, state)
            place = self.places[key]
            if target in owner:
                groups = self.groups[owner[target]]
                group = groups.setdefault((target, pattern), Group({}, by_pattern.get(pattern)))
                group.places[key] = place
            elif target in state and pattern is None and place.shape != tuple(state[target].shape):
                raise CorruptCheckpointError(
                    f"{place.file}: {key} is {list(place.shape)}, config.json wants {list(state[target].shape)}"
                )

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.groups)

    def experts(self, layer: int) -> int:
        """E of a layer."""
        return family.expert_count(self.modules[layer][1])

    def parts(self, layer: int) -> Iterator[Part]:
        """A layer in parts of some 32 MiB, at least an expert each; in one part if its experts cannot be separated."""
        count = self.experts(layer)
        groups = self.groups[layer].values()
        size = sum(place.nbytes for group in groups for place in group.places.values())
        step = max(1, min(count, _PART_BYTES * count // max(size, 1)))
        for first in range(0, count, step):
            last = min(first + step, count)
            found = [group.experts(first, last, count) for group in groups]
            known = [places for places in found if places is not None]
            if len(known) < len(found):
                whole = {key: place for group in groups for key, place in group.places.items()}
                yield Part(layer, 0, count, whole, True)
                return
            yield Part(layer, first, last, {key: place for places in known for key, place in places.items()})

    def convert(self, part: Part, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters of a part's experts, each [last - first, ...]; they may share memory with `tensors`.

        Raises CorruptCheckpointError, MissingShardError.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        name, module = self.modules[part.layer]
        original = self.parameters[part.layer]
        _set(module, {key: value[part.first : part.last] for key, value in original.items()})
        settings = LoadStateDictConfig(
            weight_mapping=get_model_conversion_mapping(self.model),
            device_map={"": "cpu"},
            dtype=self.model.dtype,
            dtype_plan=self.model._get_dtype_plan(self.model.dtype),
        )
        try:
            info, _ = convert_and_load_state_dict_in_model(self.model, tensors, settings)
            found = {key: value.detach() for key, value in module.named_parameters()}
        finally:
            _set(module, original)
        wrong = sorted(map(str, [*info.mismatched_keys, *info.conversion_errors, *info.error_msgs]))
        if wrong:
            raise CorruptCheckpointError(
                f"{self.source.path}: the experts' weights do not have their family's shape: {wrong[0]}"
            )
        for key, value in found.items():
            if value.is_meta:
                raise MissingShardError(f"{self.source.path} holds no weights for {name}.{key}")
        return found


def _set(module: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    for key, value in values.items():
        setattr(module, key, torch.nn.Parameter(value, requires_grad=False))

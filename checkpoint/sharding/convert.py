"""A checkpoint's expert weights as a family's own parameters, a few experts at a time; Transformers converts them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from checkpoint import family
from checkpoint.formats.published import published_format
from checkpoint.place import Place
from checkpoint.sharding.group import Group, dequantises
from checkpoint.sharding.model_directory import cure
from checkpoint.sharding.plan import Plan
from checkpoint.sharding.published_numbers import published_parts
from checkpoint.sharding.quantised_weight import QuantisedWeight
from checkpoint.sharding.source import Source
from checkpoint.sharding.weights import DTYPES, Dense, places
from scheduler.errors import CorruptCheckpointError, MissingShardError, UnsupportedFormatError

_PART_BYTES = 1 << 25
_PLAIN = ("F64", "F32", "F16", "BF16")


def _keeps_dtype(rule: Any) -> bool:
    """Whether it dequantises, and leaves a tensor that is not quantised in the dtype that it is stored in."""
    return dequantises(rule) and not getattr(rule, "casts", False)


@dataclass(frozen=True)
class Part:
    """Experts first..last - 1 of one MoE layer and their bytes in the checkpoint. A `whole` part cannot be divided."""

    layer: int
    first: int
    last: int
    places: dict[str, Place]
    whole: bool = False


class Conversion(Plan):
    """Which tensors of a checkpoint make up the experts of which layer, and which are the dense rest."""

    def __init__(self, source: Source, model: Any) -> None:
        """Raises MissingShardError, CorruptCheckpointError, NotMoEError, UnsupportedFormatError. Reads headers only."""
        super().__init__(source, model, published_format(source.config, source.path))
        self.modules = family.experts_modules(model)
        self.parameters = {
            layer: {key: value.detach() for key, value in family.expert_parameters(name, module).items()}
            for layer, (name, module) in self.modules.items()
        }
        self.places = places(source)
        self.targets: dict[str, str] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.groups: dict[int, dict[tuple[str, str | None], Group]] = {layer: {} for layer in self.modules}
        self.dense: Mapping[str, Dense] = {}
        self._find()
        for layer, groups in self.groups.items():
            if not groups and self.parameters[layer]:
                raise MissingShardError(
                    f"{source.path} holds no expert weights for layer {layer}, its configuration does"
                )
        self.groups = {layer: groups for layer, groups in self.groups.items() if groups}

    def _find(self) -> None:
        """Sort the checkpoint's tensors into `groups` and `dense`."""
        self.quantizer = self.format.quantizer(self.model.config) if self.format else None
        weights = self.format.weights(self.places) if self.format else {}
        self.words.update({name: word for parts in weights.values() for word, name in parts.items()})
        self._sort()
        self.dense = self._dense(weights)

    def _sort(self) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        mapping = get_model_conversion_mapping(self.model, hf_quantizer=self.quantizer)
        renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        converters = [m for m in mapping if isinstance(m, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        state = self.model.state_dict()
        owner = {f"{self.modules[n][0]}.{key}": n for n, held in self.parameters.items() for key in held}
        for key in sorted(self.places, key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, self.model.base_model_prefix, state)
            place = self.places[key]
            if target in state:
                self._check_readable(key, place, state[target])
            stays = any(map(_keeps_dtype, getattr(by_pattern.get(pattern), "operations", ())))
            if self.format and target in state and target not in owner and stays:
                stored = DTYPES.get(place.dtype, torch.float64)
                self.dtypes[target] = stored if key not in self.words else state[target].dtype
            if target in owner:
                groups = self.groups[owner[target]]
                rowwise = self.format.operations if self.format else frozenset()
                group = groups.setdefault((target, pattern), Group({}, by_pattern.get(pattern), rowwise))
                group.places[key] = place
            elif key in self.words and target in state:
                self.targets[key] = target
            elif target in state and pattern is None and place.shape != tuple(state[target].shape):
                raise CorruptCheckpointError(
                    f"{place.file}: {key} is {list(place.shape)}, config.json wants {list(state[target].shape)}"
                )

    def _check_readable(self, key: str, place: Place, parameter: torch.Tensor) -> None:
        quantised = place.dtype not in _PLAIN and parameter.is_floating_point()
        if quantised and key not in self.words:
            why = f"{self.format.name} has no rule to dequantise" if self.format else "config.json has no format for"
            raise UnsupportedFormatError(
                f"{place.file}: {key} is {place.dtype}, which {why}; give a checkpoint in bfloat16"
            )

    def kept_dtypes(self) -> dict[str, torch.dtype]:
        """Dense parameters whose dtype in the dequantised model is not the one a plain checkpoint would give them.

        Transformers leaves a tensor as it is stored where a rule that dequantises takes it, quantised or not: a gate in
        float32 stays so.
        """
        wide = self.model._get_dtype_plan(self.model.dtype)
        state = self.model.state_dict()

        def plain(target: str) -> torch.dtype:
            found: torch.dtype = state[target].dtype
            rules = (dtype for name, dtype in wide.items() if re.search(name.replace("*", ".*"), target))
            return next(rules, found)

        kept = {target: dtype for target, dtype in self.dtypes.items() if dtype in family.DTYPES.values()}
        return {target: dtype for target, dtype in kept.items() if dtype != plain(target)}

    def _dense(self, weights: dict[str, dict[str, str]]) -> dict[str, Dense]:
        """All tensors that are no expert's. Where the model has a quantised one, it stands for its parts."""
        experts = {key for layer in self.groups.values() for group in layer.values() for key in group.places}
        found: dict[str, Dense] = {k: place for k, place in self.places.items() if k not in experts}
        for name, words in weights.items():
            target = next((self.targets[key] for key in words.values() if key in self.targets), None)
            if self.format is None or target is None or not experts.isdisjoint(words.values()):
                continue
            parts = {word: self.places[key] for word, key in words.items()}
            for key in words.values():
                del found[key]
            found[name] = QuantisedWeight(name, words, parts, target, self.model, self.format, self.quantizer)
        return found

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
        held = sum(place.nbytes for group in groups for place in group.places.values())
        size = max(held, sum(value.nbytes for value in self.parameters[layer].values()))
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

    def encoding(self) -> str:
        """The encoding in which a store can keep the experts as published; empty where there is none."""
        return self.format.encoding(self.quantizer) if self.format else ""

    def published(
        self, target: str, groups: Mapping[str | None, Group], tensors: dict[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """The published numbers, scales and so on of the parameter `target` of some experts, each [n, ...].

        `groups`: its tensors, by the rule's patterns. Raises Unencodable.
        """
        return published_parts(self, target, groups, tensors)

    def check(self, tensors: dict[str, torch.Tensor]) -> None:
        """Check the values of published tensors. Raises CorruptCheckpointError."""
        if self.format:
            for key, tensor in tensors.items():
                self.format.check(self.words.get(key, ""), key, tensor)

    def convert(self, part: Part, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters of a part's experts, each [last - first, ...]; they may share memory with `tensors`.

        Raises CorruptCheckpointError, MissingShardError.
        """
        self.check(tensors)
        found = self._converted(part, tensors, "cpu")
        for key, value in found.items():
            if value.is_meta:
                raise MissingShardError(f"{self.source.path} holds no weights for {self.modules[part.layer][0]}.{key}")
        return found

    def check_shapes(self, part: Part, tensors: dict[str, torch.Tensor]) -> None:
        """Raises CorruptCheckpointError if `tensors`, which are on the meta device, do not become a part's experts."""
        self._converted(part, tensors, "meta")

    def _converted(self, part: Part, tensors: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        _, module = self.modules[part.layer]
        original = self.parameters[part.layer]
        _set(module, {key: value[part.first : part.last] for key, value in original.items()})
        settings = LoadStateDictConfig(
            weight_mapping=get_model_conversion_mapping(self.model, hf_quantizer=self.quantizer),
            hf_quantizer=self.quantizer,
            device_map={"": device},
            dtype=self.model.dtype,
            dtype_plan=self.model._get_dtype_plan(self.model.dtype),
        )
        try:
            info, _ = convert_and_load_state_dict_in_model(self.model, tensors, settings)
            found = {key: value.detach() for key, value in module.named_parameters()}
            for target, _ in (place for place, group in self.groups[part.layer].items() if group.dequantises):
                key = target.rpartition(".")[2]
                found[key] = found[key].to(original[key].dtype)  # Transformers leaves it where it is not quantised
        finally:
            _set(module, original)
        for target, trace in sorted(info.conversion_errors.items()):
            reason = trace.splitlines()[-2:][0]  # behind a traceback, and before what Transformers says of it
            raise CorruptCheckpointError(
                f"{self.source.path}: {target} cannot be made: {reason}; {cure(self.source.path)}"
            )
        wrong = sorted(map(str, [*info.mismatched_keys, *info.error_msgs]))
        if wrong:
            raise CorruptCheckpointError(
                f"{self.source.path}: the experts' weights do not have their family's shape: {wrong[0]}"
            )
        return found


def _set(module: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    for key, value in values.items():
        setattr(module, key, torch.nn.Parameter(value, requires_grad=False))

"""Whether a checkpoint holds every tensor that its family needs, found before anything is written.

Transformers' own conversion is run over tensors without bytes: what it would miss when the store is loaded is missing.
Tied weights, and those that the family makes anew, are not demanded.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import torch

from checkpoint import family
from checkpoint.sharding.convert import Conversion, Part
from checkpoint.sharding.model_directory import cure
from checkpoint.sharding.weights import DTYPES, Dense
from scheduler.errors import CorruptCheckpointError, MissingShardError

META = "meta"
_FEW = 4
"""So many tensors are named in a message."""


def check_complete(plan: Conversion) -> None:
    """Raises MissingShardError for a tensor that is missing, CorruptCheckpointError for one of another shape, by name.

    Reads nothing. For a GGUF file `GgufConversion` has checked it.
    """
    if plan.source.gguf is not None:
        return
    for layer in plan.layers:
        _check_experts(plan, layer)
    _check_dense(plan)


def _check_dense(plan: Conversion) -> None:
    model = family.meta_model(plan.model.config, plan.model.dtype)
    family.strip_experts(model)
    info = _loaded(model, {key: _empty(place) for key, place in plan.dense.items()})
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    for name, held, wanted in sorted(info.mismatched_keys, key=str):
        raise CorruptCheckpointError(
            f"{plan.source.path} holds {name} as {list(held)}, config.json wants {list(wanted)}; "
            f"{cure(plan.source.path)}"
        )
    for target, trace in sorted(info.conversion_errors.items()):
        raise CorruptCheckpointError(
            f"{plan.source.path}: {target} cannot be made of the tensors there: {trace.splitlines()[-2:][0]}; "
            f"{cure(plan.source.path)}"
        )
    if info.missing_keys:
        raise _missing(plan, sorted(info.missing_keys))


def _check_experts(plan: Conversion, layer: int) -> None:
    name, _ = plan.modules[layer]
    count = plan.experts(layer)
    for (target, _), group in plan.groups[layer].items():
        if group.stacks and len(group.places) < count:
            raise _missing(plan, [target], layer)
        shapes = Counter(place.shape for place in group.places.values())
        if group.stacks and not group.dequantises and len(shapes) > 1:
            usual = shapes.most_common(1)[0][0]
            key, place = next((key, place) for key, place in group.places.items() if place.shape != usual)
            raise CorruptCheckpointError(
                f"{place.file}: {key} is {list(place.shape)}, the other experts' are {list(usual)}; "
                f"{cure(plan.source.path)}"
            )
    lost = [f"{name}.{key}" for key in plan.parameters[layer] if not _has(plan, layer, f"{name}.{key}")]
    if lost:
        raise _missing(plan, lost, layer)
    if any(group.dequantises for group in plan.groups[layer].values()):
        return  # by the values of its numbers, which the format checks
    parts = [group.experts(0, 1, count) for group in plan.groups[layer].values()]
    whole = any(places is None for places in parts)
    held = [group.places for group in plan.groups[layer].values()] if whole else [p for p in parts if p is not None]
    part = Part(
        layer, 0, count if whole else 1, {key: place for places in held for key, place in places.items()}, whole
    )
    try:
        plan.check_shapes(part, {key: _empty(place) for key, place in part.places.items()})
    except CorruptCheckpointError as error:
        targets = [f"{name}.{key}" for key in plan.parameters[layer]]
        if _absent(plan, targets, layer):
            raise _missing(plan, targets, layer) from error
        raise


def _has(plan: Conversion, layer: int, target: str) -> bool:
    """Whether tensors become this parameter: themselves, or as one of several that a rule makes."""
    groups = plan.groups[layer]
    if any(name == target for name, _ in groups):
        return True
    stem, _, key = target.rpartition(".")
    return any(
        any(pattern.rpartition(".")[2] == key for pattern in getattr(group.converter, "target_patterns", ()))
        for (name, _), group in groups.items()
        if name.rpartition(".")[0] == stem
    )


def _loaded(model: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """What Transformers says of loading these tensors, which have no bytes, into a model without bytes."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    settings = LoadStateDictConfig(
        weight_mapping=get_model_conversion_mapping(model), device_map={"": META}, dtype=model.dtype
    )
    info, _ = convert_and_load_state_dict_in_model(model, tensors, settings)
    return info


def _empty(place: Dense) -> torch.Tensor:
    return torch.empty(place.shape, dtype=DTYPES.get(place.dtype, torch.uint8), device=META)


def _missing(plan: Conversion, targets: list[str], layer: int | None = None) -> MissingShardError:
    """`targets`: Transformers' names of what is missing, or is made of it; experts' ones are of `layer`."""
    absent = _absent(plan, targets, layer) or targets
    known = f" ({targets[0]} in Transformers)" if absent[0] != targets[0] else ""
    more = f" and {len(absent) - _FEW} more" if len(absent) > _FEW else ""
    return MissingShardError(
        f"{plan.source.path} lacks the tensor{'s' * (len(absent) > 1)} {', '.join(absent[:_FEW])}{more}{known}, which "
        f"this {plan.model.config.model_type} needs; {cure(plan.source.path)}"
    )


def _absent(plan: Conversion, targets: list[str], layer: int | None) -> list[str]:
    """Names of the tensors that these parameters are made of and that are not there: as they are published, or, if the
    layer's tensors are there under Transformers' own names, by these."""
    names = _published(plan, targets)
    if layer is not None:
        held = {key for group in plan.groups[layer].values() for key in group.places}
        every = [f"{plan.modules[layer][0]}.{key}" for key in plan.parameters[layer]]
        if held and held.isdisjoint(_published(plan, every)):
            names = set(targets)
    return sorted(names - plan.places.keys())


def _published(plan: Conversion, targets: list[str]) -> set[str]:
    """The names under which Transformers would save these parameters."""
    from transformers.core_model_loading import revert_weight_conversion

    state = plan.model.state_dict()
    with contextlib.suppress(Exception):  # a rule that cannot be reversed without values
        return set(revert_weight_conversion(plan.model, {name: state[name] for name in targets}))
    return set(targets)

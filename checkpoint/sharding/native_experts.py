"""Experts in their published numbers: which layers of a checkpoint can keep them, and what goes into a blob.

Transformers dequantises a weight and then stacks, joins or transposes what it has, as the family's rule says. Here the
same rule is applied to numbers and scales without dequantising them. Before anything is written, the first expert of
each layer is encoded, restored, and compared with what Transformers makes of it, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from checkpoint.manifest import stored_name
from checkpoint.native.encoding import Encoding, Unencodable
from checkpoint.native.encodings import ENCODINGS
from checkpoint.sharding.convert import Conversion, Part
from checkpoint.sharding.group import Group
from checkpoint.sharding.model_directory import cure
from checkpoint.sharding.weights import buffer_bytes, finite, read
from checkpoint.tensors import aligned_buffer
from scheduler.errors import CorruptCheckpointError

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class NativeExperts:
    """What a store keeps in published numbers."""

    encoding: Encoding | None
    """None where the experts are stored dequantised."""
    examples: dict[int, Tensors]
    """The tensors of the first expert's blob, each [1, ...], of each encoded layer. On the meta device."""
    full: dict[int, Tensors]
    """The same expert's parameters, as Transformers makes them."""
    because: str = ""
    """Why they are stored dequantised, though they are published in an encoding; else empty."""
    quantised_from: str = ""
    """The format or dtype of a checkpoint whose experts are quantised here; else empty."""

    @property
    def name(self) -> str:
        """Of the encoding."""
        return self.encoding.name if self.encoding else ""

    def tensors(self, plan: Conversion, part: Part, tensors: Tensors) -> Tensors | None:
        """What goes into the blobs of a part's experts, each [last - first, ...]. None for a layer that is not encoded.

        Raises CorruptCheckpointError.
        """
        if self.encoding is None or part.layer not in self.full:
            return None
        plan.check(tensors)
        full = self.full[part.layer]
        try:
            found = _encoded(plan, part, tensors, self.encoding, {key: value.dtype for key, value in full.items()})
            _check_layout(found, self.examples[part.layer])
        except Unencodable as error:
            raise CorruptCheckpointError(
                f"{plan.source.path}: an expert from {part.first} to {part.last - 1} of "
                f"{plan.modules[part.layer][0]} is encoded otherwise than the first, or damaged ({error}); store the "
                f"experts with --experts dequantised, or {cure(plan.source.path)}"
            ) from error
        restored = {key: torch.empty(value.shape[1:], dtype=value.dtype) for key, value in full.items()}
        for row in range(part.last - part.first):
            _restore(self.encoding, restored, {key: value[row] for key, value in found.items()})
            for key, value in restored.items():
                if not finite(value):
                    raise CorruptCheckpointError(
                        f"{plan.source.path}: {plan.modules[part.layer][0]}.{key} of expert {part.first + row} is "
                        f"infinite; {cure(plan.source.path)}"
                    )
        return found

    def stored(self, plan: Conversion, part: Part, parameters: Tensors) -> Tensors:
        """What goes into the blobs of a layer that is not encoded: the parameters of a part's experts."""
        return parameters


def plan_native(plan: Conversion, wanted: bool) -> NativeExperts:
    """What of a checkpoint can be kept in its published numbers, found with the first expert of each layer, and with
    the dtypes of all.

    All of it, or nothing. Raises CheckpointError.
    """
    if not wanted or not (plan.format or plan.words):
        return NativeExperts(None, {}, {})
    layers = [layer for layer in plan.layers if _is_encoded(plan, layer)]
    if not layers:
        return NativeExperts(None, {}, {}, "the checkpoint has no quantised experts")
    encoding = ENCODINGS.get(plan.encoding())
    if encoding is None:
        return NativeExperts(None, {}, {}, "there is no encoding for this format")
    examples: dict[int, Tensors] = {}
    full: dict[int, Tensors] = {}
    for layer in layers:
        try:
            _check_alike(plan, layer)
            tried = _tried(plan, layer, encoding)
            full[layer], examples[layer] = ({key: value.to("meta") for key, value in one.items()} for one in tried)
        except Unencodable as error:
            return NativeExperts(None, {}, {}, f"{plan.modules[layer][0]}: {error}")
    return NativeExperts(encoding, examples, full)


def _check_layout(tensors: Tensors, example: Tensors) -> None:
    """Raises Unencodable where an expert's tensors are not laid out as those of the first."""
    found, expected = ({key: (one.dtype, one.shape[1:]) for key, one in some.items()} for some in (tensors, example))
    if found != expected:
        other = next(key for key in {**found, **expected} if found.get(key) != expected.get(key))
        raise Unencodable(f"{other} is {found.get(other, 'missing')}, of the first {expected.get(other, 'missing')}")


def _is_encoded(plan: Conversion, layer: int) -> bool:
    return any(key in plan.words for group in plan.groups[layer].values() for key in group.places)


def _check_alike(plan: Conversion, layer: int) -> None:
    """Raises Unencodable where the experts of a layer are published in different dtypes."""
    for (target, _), group in plan.groups[layer].items():
        dtypes = sorted({place.dtype for place in group.places.values()})
        if len(dtypes) > 1:
            raise Unencodable(f"its experts differ: {target} is in {' and '.join(dtypes)}")


def first_expert(plan: Conversion, layer: int) -> Part | None:
    """The first expert of a layer alone. None where experts cannot be separated."""
    found = [group.experts(0, 1, plan.experts(layer)) for group in plan.groups[layer].values()]
    if any(one is None for one in found):
        return None
    return Part(layer, 0, 1, {key: place for one in found if one is not None for key, place in one.items()})


def _tried(plan: Conversion, layer: int, encoding: Encoding) -> tuple[Tensors, Tensors]:
    """The first expert's parameters, and the tensors of its blob, from which they are restored. Raises Unencodable."""
    part = first_expert(plan, layer)
    if part is None:
        raise Unencodable("its experts cannot be separated")
    tensors = read(part.places, aligned_buffer(buffer_bytes(part.places)))
    full = plan.convert(part, dict(tensors))
    blob = _encoded(plan, part, tensors, encoding, {key: value.dtype for key, value in full.items()})
    restored = {key: torch.empty_like(value[0]) for key, value in full.items()}
    shapes = {key: (stored_name(value.dtype), tuple(value.shape)) for key, value in restored.items()}
    if not encoding.fits(
        shapes, {key: (stored_name(value.dtype), tuple(value.shape[1:])) for key, value in blob.items()}
    ):
        raise Unencodable("its tensors do not have the shapes of its parameters")
    _restore(encoding, restored, {key: value[0] for key, value in blob.items()})
    for key, value in restored.items():
        if not torch.equal(value.view(torch.uint8), full[key][0].contiguous().view(torch.uint8)):
            raise Unencodable(f"{key} of its first expert, restored, differs from what Transformers makes of it")
    return full, blob


def _restore(encoding: Encoding, full: Tensors, blob: Tensors) -> None:
    shapes = [tuple(value.shape) for value in full.values() if value.dim() == 2]
    scratch = torch.empty(encoding.scratch_for(shapes, "cpu", torch.get_num_threads()), dtype=torch.uint8)
    encoding.restore_into(full, blob, scratch)


def _encoded(
    plan: Conversion, part: Part, tensors: Tensors, encoding: Encoding, dtypes: dict[str, torch.dtype]
) -> Tensors:
    """The tensors of the blobs of a part's experts. Raises Unencodable."""
    found: Tensors = {}
    for key, dtype in dtypes.items():
        target = f"{plan.modules[part.layer][0]}.{key}"
        groups = {pattern: group for (name, pattern), group in plan.groups[part.layer].items() if name == target}
        if any(name in plan.words for group in groups.values() for name in group.places):
            parts = encoding.encode(plan.published(target, groups, tensors))
            found |= {f"{key}.{name}": part for name, part in parts.items()}
        else:
            found[key] = _plain(key, groups, tensors).to(dtype)
    return found


def _plain(key: str, groups: dict[str | None, Group], tensors: Tensors) -> torch.Tensor:
    held = [tensors[name] for group in groups.values() for name in group.places if name in tensors]
    if len(held) != 1 or any(group.converter for group in groups.values()):
        raise Unencodable(f"{key} is converted")
    return held[0]

"""Which tensors of a GGUF file make up the experts of which layer, and which are the dense rest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint.formats.gguf_blocks import encoding_of, published_blocks, quantised_kind
from checkpoint.formats.gguf_file import gguf_tokenizer, has_tokenizer
from checkpoint.formats.gguf_weights import GgufWeights, gguf_weights
from checkpoint.formats.unreadable import DAMAGED, unreadable
from checkpoint.native.encoding import Unencodable
from checkpoint.place import Place
from checkpoint.sharding.convert import Conversion, Part
from checkpoint.sharding.group import Group
from checkpoint.sharding.model_directory import cure
from checkpoint.sharding.weights import DTYPES, buffer_bytes, read
from checkpoint.tensors import aligned_buffer
from scheduler.errors import CheckpointError, CorruptCheckpointError, MissingShardError

_PIECE_BYTES = 1 << 25
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _Stacked(Group):
    """Tensors with an expert in each row."""

    def experts(self, first: int, last: int, count: int) -> dict[str, Place] | None:
        if any(len(place.shape) < 2 or place.shape[0] != count for place in self.places.values()):
            return None
        return {key: place.rows(first, last) for key, place in self.places.items()}


@dataclass(frozen=True)
class GgufWeight:
    """A dense parameter of the model, dequantised some rows at a time. It has the properties of a `Place`."""

    target: str
    parts: dict[str, Place]
    weights: GgufWeights

    @property
    def file(self) -> Path:
        return self.weights.file.path

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weights.model.get_parameter_or_buffer(self.target).shape)

    @property
    def dtype(self) -> str:
        """In the words of safetensors."""
        return _NAMES[self.weights.model.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def pieces(self) -> Iterator[torch.Tensor]:
        """The bytes of the parameter as uint8, some rows at a time. Raises CheckpointError, DoesNotFitError."""
        shape, name = self.shape, next(iter(self.parts))
        by_row = len(shape) > 1 and len(self.parts) == 1 and self.weights.plain(name)
        step = max(1, _PIECE_BYTES * shape[0] // self.nbytes) if by_row else shape[0]
        for first in range(0, shape[0], step):
            last = min(first + step, shape[0])
            places = {key: place.rows(first, last) for key, place in self.parts.items()} if by_row else self.parts
            tensors = read(places, aligned_buffer(buffer_bytes(places)))
            found = made(self.weights, self.target, tensors, (last - first, *shape[1:]))
            yield found.contiguous().view(-1).view(torch.uint8)


class GgufConversion(Conversion):
    """As `Conversion`, of a GGUF file. `words`: the types of its quantised tensors of experts."""

    def _find(self) -> None:
        if self.source.gguf is None:
            raise CheckpointError(f"{self.source.path} is no GGUF file; give one, or a directory to Conversion")
        self.weights = gguf_weights(self.source.gguf, self.model)
        owner = {f"{self.modules[n][0]}.{key}": n for n, held in self.parameters.items() for key in held}
        dense: dict[str, dict[str, Place]] = {}
        for name, target in self.weights.targets.items():
            place = self.places[name]
            if target in owner:
                layer = owner[target]
                self.groups[layer].setdefault((target, None), _Stacked({}, None)).places[name] = place
            else:
                dense.setdefault(target, {})[name] = place
        self.dense = {target: GgufWeight(target, parts, self.weights) for target, parts in dense.items()}
        self.words = {
            name: kind
            for groups in self.groups.values()
            for group in groups.values()
            for name in group.places
            if (kind := quantised_kind(self.weights.file.tensors[name].kind))
        }
        experts = {target: group.places for groups in self.groups.values() for (target, _), group in groups.items()}
        self._check_whole(dense | experts)
        if has_tokenizer(self.source.path):
            gguf_tokenizer(self.source.path)  # one that cannot be read is refused before anything is written

    def _check_whole(self, held: dict[str, dict[str, Place]]) -> None:
        """Raises MissingShardError or CorruptCheckpointError for a parameter without its tensors: Transformers would
        make it random, or half of it zero."""
        tied = self.model.all_tied_weights_keys if self.model.config.tie_word_embeddings else {}
        for target, parameter in self.model.named_parameters():
            if target not in held and target not in tied:
                raise MissingShardError(
                    f"{self.source.path} holds no tensor that Transformers would load as {target}; give the checkpoint "
                    "that the file was made from"
                )
            shapes = {name: self.weights.file.tensors[name].shape for name in held.get(target, {})}
            if shapes and sum(map(math.prod, shapes.values())) != parameter.numel():
                described = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
                raise CorruptCheckpointError(
                    f"{self.source.path} holds {described} for {target}, which its settings want as "
                    f"{list(parameter.shape)}; {cure(self.source.path)}"
                )

    def encoding(self) -> str:
        """See `Conversion.encoding`."""
        return encoding_of(self.words.values())

    def published(
        self, target: str, groups: Mapping[str | None, Group], tensors: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """See `Conversion.published`. The rows of a gate are before those of its up-projection."""
        names = sorted(name for group in groups.values() for name in group.places)  # ffn_gate_exps, ffn_up_exps
        found = [published_blocks(self.weights.file.tensors[name].kind, tensors[name]) for name in names]
        layouts = {tuple((part, value.dtype, value.shape[2:]) for part, value in one.items()) for one in found}
        if len(layouts) > 1:
            raise Unencodable(f"{target} is in {' and '.join(self.words.get(name, 'floats') for name in names)}")
        return {part: torch.cat([one[part] for one in found], dim=1) for part in found[0]}

    def convert(self, part: Part, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Conversion.convert`."""
        found = {}
        for (target, _), group in self.groups[part.layer].items():
            key = target.rpartition(".")[2]
            shape = (part.last - part.first, *self.parameters[part.layer][key].shape[1:])
            found[key] = made(self.weights, target, {name: tensors[name] for name in group.places}, shape)
        return {key: found[key] for key in self.parameters[part.layer]}


def made(weights: GgufWeights, target: str, tensors: dict[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """A parameter, or rows of it, of this shape. Raises CorruptCheckpointError, DoesNotFitError."""
    try:
        found = weights.parameter(target, tensors)
    except (*DAMAGED, RuntimeError, MemoryError) as error:
        raise unreadable(f"{weights.file.path}: {', '.join(tensors)} cannot become {target}", error) from error
    if tuple(found.shape) != shape:
        raise CorruptCheckpointError(
            f"{weights.file.path}: {', '.join(tensors)} become {target} of {list(found.shape)}, its settings want "
            f"{list(shape)}; {cure(weights.file.path)}"
        )
    return found

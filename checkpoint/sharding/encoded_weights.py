"""Writes linear layers of the dense part encoded (`checkpoint/encoded_dense.py`), while they are read."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from checkpoint.direct_io import Appender
from checkpoint.encoded_dense import ENCODING_OF, PUBLISHED, encodable_layers, group_of
from checkpoint.native.encoding import CODES, SCALES, Unencodable
from checkpoint.native.encodings import GGML_INTEGERS
from checkpoint.native.integers import MINIMUMS
from checkpoint.place import Place
from checkpoint.quantisation import BITS
from checkpoint.sharding.convert import Conversion
from checkpoint.sharding.few_bits import in_few_bits
from checkpoint.sharding.model_directory import cure
from checkpoint.sharding.published_dense import published_dense
from checkpoint.sharding.weights import DTYPES, Dense, buffer_bytes, finite, read
from checkpoint.tensors import aligned_buffer
from scheduler.errors import CorruptCheckpointError

_FILE_BYTES = 1 << 29
_PIECE_VALUES = 1 << 22
"""Of a weight that is read, and quantised, at a time."""
_WORDS = {dtype: word for word, dtype in DTYPES.items()}


Layout = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, dtype in the words of safetensors, and shape of each part, in the order in which they are written."""


@dataclass(frozen=True)
class EncodedWeight:
    """A dense tensor of the checkpoint, and what is written of it."""

    dense: Dense
    encoding: str
    layout: Layout
    tensors: Callable[[], Iterator[torch.Tensor]]
    """The parts, one after the other, some rows of one at a time."""

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(math.prod(shape) * DTYPES[word].itemsize for _, word, shape in self.layout)


@dataclass(frozen=True)
class Encoded:
    """What a store keeps encoded of the dense part."""

    parameters: Mapping[str, EncodedWeight] = field(default_factory=dict)
    """By the model's parameter that each is."""
    keys: frozenset[str] = frozenset()
    """Their names in `Conversion.dense`."""

    @property
    def weights(self) -> int:
        """Their number of elements."""
        return sum(math.prod(one.dense.shape) for one in self.parameters.values())

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(one.nbytes for one in self.parameters.values())


NONE_ENCODED = Encoded()


def choose_encoded(plan: Conversion, kept: str, beat: Callable[[], None] = lambda: None) -> Encoded:
    """The dense tensors that are the whole weight of a linear layer that can be encoded (`encodable_layers`).

    `kept`: a key of `BITS`, or `PUBLISHED` for those that the checkpoint has quantised, in its numbers; all of these
    are read and compared, with a `beat` after each. With any other `kept` there are none. Raises CheckpointError.
    """
    if kept not in (*BITS, PUBLISHED):
        return NONE_ENCODED
    layers = encodable_layers(plan.model.config, plan.model.dtype)
    wide = plan.kept_dtypes()
    found: dict[str, EncodedWeight] = {}
    keys: list[str] = []
    for key, target in _whole_parameters(plan):
        dense, name = plan.dense[key], target.removesuffix(".weight")
        if target != f"{name}.weight" or layers.get(name) != tuple(dense.shape) or target in wide:
            continue
        with contextlib.suppress(Unencodable):  # it is written as it is
            found[target] = _published(plan, dense, target) if kept == PUBLISHED else _in_few_bits(dense, target, kept)
            keys.append(key)
        beat()
    return Encoded(dict(sorted(found.items())), frozenset(keys))


def _in_few_bits(dense: Dense, parameter: str, kept: str) -> EncodedWeight:
    rows, columns = _shape(dense)
    names = [SCALES] if kept == "int8" else [SCALES, MINIMUMS]
    levels = [(name, "BF16", (rows, columns // group_of(columns))) for name in names]
    layout = ((CODES, "U8", (rows, columns * BITS[kept] // 8)), *levels)

    def tensors() -> Iterator[torch.Tensor]:
        pieces: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        for some in _rows(parameter, dense):
            found = in_few_bits(some, BITS[kept])
            yield found[CODES]
            for name in names:
                pieces[name].append(found[name])
        for name in names:
            yield torch.cat(pieces[name])

    return EncodedWeight(dense, GGML_INTEGERS, layout, tensors)


def _published(plan: Conversion, dense: Dense, parameter: str) -> EncodedWeight:
    encoding, parts = published_dense(plan, dense, parameter)
    layout = tuple((name, _WORDS[part.dtype], tuple(part.shape)) for name, part in parts.items())

    def tensors() -> Iterator[torch.Tensor]:
        yield from published_dense(plan, dense, parameter)[1].values()

    return EncodedWeight(dense, encoding, layout, tensors)


def _whole_parameters(plan: Conversion) -> Iterator[tuple[str, str]]:
    """Dense tensors, under the names that the store gives them, that are parameters without a conversion."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(plan.model)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    state = plan.model.state_dict()
    for key in plan.dense:
        target, pattern = rename_source_key(key, renamings, converters, plan.model.base_model_prefix, state)
        if pattern is None and target in state:
            yield key, target


def write_encoded(chosen: Encoded, folder: Path, step: Callable[[int], None]) -> dict[str, str]:
    """Write the encoded weights in files of some 512 MiB. Returns the files' checksums.

    Memory: some rows of a weight and its scales, or what a weight takes as published. `step` gets the bytes that each
    plain weight would take. Raises CheckpointError, CorruptCheckpointError, OSError.
    """
    sums: dict[str, str] = {}
    for number, part in enumerate(_files(chosen)):
        file = folder / f"encoded-{number:05d}.safetensors"
        sums[file.name] = _write_file(part, file, step)
    return sums


def _files(chosen: Encoded) -> Iterator[dict[str, EncodedWeight]]:
    part: dict[str, EncodedWeight] = {}
    for name, weight in chosen.parameters.items():
        part[name] = weight
        if sum(one.nbytes for one in part.values()) >= _FILE_BYTES:
            yield part
            part = {}
    if part:
        yield part


def _write_file(part: dict[str, EncodedWeight], file: Path, step: Callable[[int], None]) -> str:
    encodings = json.dumps({parameter: weight.encoding for parameter, weight in part.items()})
    entries: dict[str, object] = {"__metadata__": {"format": "pt", ENCODING_OF: encodings}}
    end = 0
    for parameter, weight in part.items():
        for name, word, shape in weight.layout:
            size = math.prod(shape) * DTYPES[word].itemsize
            entries[f"{parameter}.{name}"] = {"dtype": word, "shape": shape, "data_offsets": [end, end + size]}
            end += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    digest = xxhash.xxh3_128()
    with Appender(file) as out:

        def append(data: torch.Tensor) -> None:
            flat = data.contiguous().view(-1).view(torch.uint8)
            digest.update(flat.numpy().data)
            out.append(flat)

        append(torch.frombuffer(bytearray(len(header).to_bytes(8, "little") + header), dtype=torch.uint8))
        for weight in part.values():
            for data in weight.tensors():
                append(data)
                step(0)
            step(weight.dense.nbytes)
    return digest.hexdigest()


def _shape(dense: Dense) -> tuple[int, int]:
    rows, columns = dense.shape
    return rows, columns


def _rows(parameter: str, dense: Dense) -> Iterator[torch.Tensor]:
    """A weight, some rows at a time: [n, columns]. Valid until the next ones. Raises CorruptCheckpointError."""
    _, columns = _shape(dense)
    pieces = _read_rows(dense) if isinstance(dense, Place) else dense.pieces()
    for data in pieces:
        found = data.view(DTYPES[dense.dtype]).view(-1, columns)
        if not finite(found):
            raise CorruptCheckpointError(f"{dense.file}: {parameter} holds NaN or infinity; {cure(dense.file)}")
        yield from found.split(max(_PIECE_VALUES // columns, 1))


def _read_rows(place: Place) -> Iterator[torch.Tensor]:
    rows, columns = _shape(place)
    step = max(_PIECE_VALUES // columns, 1)
    buffer = aligned_buffer(buffer_bytes({"": place.rows(0, min(step, rows))}) + (1 << 13))
    for first in range(0, rows, step):
        yield read({"": place.rows(first, min(first + step, rows))}, buffer)[""].view(torch.uint8)

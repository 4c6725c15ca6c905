"""Writes linear layers of the dense part in few bits (`checkpoint/encoded_dense.py`), while they are read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from checkpoint.direct_io import Appender
from checkpoint.encoded_dense import BITS, ENCODING_OF, encodable_layers, encoded_bytes, group_of
from checkpoint.native.encoding import CODES, SCALES
from checkpoint.native.encodings import GGML_INTEGERS
from checkpoint.native.integers import MINIMUMS
from checkpoint.place import Place
from checkpoint.sharding.convert import Conversion
from checkpoint.sharding.few_bits import in_few_bits
from checkpoint.sharding.model_directory import cure
from checkpoint.sharding.weights import DTYPES, Dense, buffer_bytes, finite, read
from checkpoint.tensors import aligned_buffer
from scheduler.errors import CorruptCheckpointError

_FILE_BYTES = 1 << 29
_PIECE_VALUES = 1 << 22
"""Of a weight that is read, and quantised, at a time."""


@dataclass(frozen=True)
class Encoded:
    """What a store keeps encoded of the dense part: `kept` is a key of `BITS`."""

    kept: str
    tensors: Mapping[str, Dense] = field(default_factory=dict)
    """Of the checkpoint, by the model's parameter that each is."""
    keys: frozenset[str] = frozenset()
    """Their names in `Conversion.dense`."""

    @property
    def weights(self) -> int:
        """Their number of elements."""
        return sum(math.prod(dense.shape) for dense in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(encoded_bytes(self.kept, _shape(dense)) for dense in self.tensors.values())


NONE_ENCODED = Encoded("")


def choose_encoded(plan: Conversion, kept: str) -> Encoded:
    """The dense tensors that are the whole weight of a linear layer that can be encoded (`encodable_layers`).

    `kept`: a key of `BITS`; with any other there are none.
    """
    if kept not in BITS:
        return NONE_ENCODED
    layers = encodable_layers(plan.model.config, plan.model.dtype)
    wide = plan.kept_dtypes()
    found: dict[str, Dense] = {}
    keys: list[str] = []
    for key, target in _whole_parameters(plan):
        dense, name = plan.dense[key], target.removesuffix(".weight")
        if target == f"{name}.weight" and layers.get(name) == tuple(dense.shape) and target not in wide:
            found[target] = dense
            keys.append(key)
    return Encoded(kept, dict(sorted(found.items())), frozenset(keys))


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

    Memory: some rows of a weight, and the scales of one. `step` gets the bytes that have been read. Raises
    CheckpointError, CorruptCheckpointError, OSError.
    """
    sums: dict[str, str] = {}
    for number, part in enumerate(_files(chosen)):
        file = folder / f"encoded-{number:05d}.safetensors"
        sums[file.name] = _write_file(part, chosen.kept, file, step)
    return sums


def _files(chosen: Encoded) -> Iterator[dict[str, Dense]]:
    part: dict[str, Dense] = {}
    held = 0
    for name, dense in chosen.tensors.items():
        part[name] = dense
        held += encoded_bytes(chosen.kept, _shape(dense))
        if held >= _FILE_BYTES:
            yield part
            part, held = {}, 0
    if part:
        yield part


def _write_file(part: dict[str, Dense], kept: str, file: Path, step: Callable[[int], None]) -> str:
    encodings = json.dumps(dict.fromkeys(part, GGML_INTEGERS))
    entries: dict[str, object] = {"__metadata__": {"format": "pt", ENCODING_OF: encodings}}
    end = 0
    for parameter, dense in part.items():
        for name, dtype, shape in _parts(kept, _shape(dense)):
            size = math.prod(shape) * DTYPES[dtype].itemsize
            entries[f"{parameter}.{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
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
        for parameter, dense in part.items():
            levels: dict[str, list[torch.Tensor]] = {SCALES: [], MINIMUMS: []}
            for rows in _rows(parameter, dense):
                found = in_few_bits(rows, BITS[kept])
                append(found.pop(CODES))
                for name, level in found.items():
                    levels[name].append(level)
                step(rows.nbytes)
            for pieces in filter(None, levels.values()):
                append(torch.cat(pieces))
    return digest.hexdigest()


def _parts(kept: str, shape: tuple[int, int]) -> list[tuple[str, str, tuple[int, int]]]:
    """Name, dtype and shape of each part, in the order in which they are written."""
    rows, columns = shape
    names = [SCALES] if kept == "int8" else [SCALES, MINIMUMS]
    levels = [(name, "BF16", (rows, columns // group_of(columns))) for name in names]
    return [(CODES, "U8", (rows, columns * BITS[kept] // 8)), *levels]


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

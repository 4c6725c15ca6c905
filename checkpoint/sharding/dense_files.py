"""Everything of a checkpoint but its experts, under the checkpoint's own names, in an ordinary model directory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import xxhash

from checkpoint.dense import KEPT_DTYPES
from checkpoint.direct_io import Appender, sync_directory, write_synced
from checkpoint.formats.gguf_file import write_settings
from checkpoint.formats.settings import without_quantisation
from checkpoint.manifest import MANIFEST
from checkpoint.sharding.partial_store import Progress
from checkpoint.sharding.source import INDEX, Source
from checkpoint.sharding.weights import Dense, Pieces, Place, finite_bytes
from checkpoint.store import ExpertStore, file_checksum
from scheduler.errors import CorruptCheckpointError

_PART_BYTES = 1 << 29


def write_dense(
    source: Source, tensors: Mapping[str, Dense], dtypes: dict[str, dict[str, str]], folder: Path, report: Progress
) -> dict[str, str]:
    """Write the tensors in files of some 512 MiB, and the model's other files. Returns the files' checksums.

    Quantised weights are written dequantised, and config.json without their format. `dtypes`: see
    `checkpoint.dense.KEPT_DTYPES`. Memory: 16 MiB at a time, of a quantised weight some rows.
    `report("dense", bytes done, of)`. Raises CorruptCheckpointError, OSError.
    """
    total, done = sum(place.nbytes for place in tensors.values()), 0

    def step(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        report("dense", done, total)

    folder.mkdir()
    sums: dict[str, str] = {}
    if source.gguf is not None:
        write_settings(source.gguf, folder)
        for file in folder.iterdir():
            _sync(file)
    for file in source.aux_files():
        if file.name == "config.json" and source.config != (plain := without_quantisation(source.config)):
            write_synced(folder / file.name, json.dumps(plain, indent=1))
        else:
            _copy(file, folder / file.name)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(_parts(tensors)):
        name = f"dense-{number:05d}.safetensors"
        sums[name] = _write_part(part, folder / name, step)
        weight_map.update(dict.fromkeys(part, name))
    metadata = {"total_size": total} | ({KEPT_DTYPES: dtypes} if dtypes else {})
    write_synced(folder / INDEX, json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=1))
    sums |= {file.name: file_checksum(file) for file in folder.iterdir() if file.name not in sums}
    sync_directory(folder)
    return dict(sorted(sums.items()))


def add_files(store: ExpertStore, source: Source) -> ExpertStore:
    """Copy what has come to the checkpoint since the store was made, such as a tokenizer. Raises OSError."""
    manifest, folder = store.manifest, store.dense
    missing = [file for file in source.aux_files() if file.name not in manifest.dense]
    if not missing:
        return store
    for file in missing:
        fresh = folder / f".{file.name}.partial"
        _copy(file, fresh)
        fresh.replace(folder / file.name)
    sync_directory(folder)
    sums = manifest.dense | {file.name: file_checksum(folder / file.name) for file in missing}
    fresh = store.path / f".{MANIFEST}.partial"
    write_synced(fresh, replace(manifest, dense=dict(sorted(sums.items()))).to_json())
    fresh.replace(store.path / MANIFEST)
    sync_directory(store.path)
    return ExpertStore.open(store.path)


def _copy(file: Path, target: Path) -> None:
    shutil.copyfile(file, target)
    _sync(target)


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _parts(tensors: Mapping[str, Dense]) -> Iterator[dict[str, Dense]]:
    part: dict[str, Dense] = {}
    for key, place in sorted(tensors.items(), key=lambda item: (item[1].file, item[0])):
        part[key] = place
        if sum(p.nbytes for p in part.values()) >= _PART_BYTES:
            yield part
            part = {}
    if part:
        yield part


def _write_part(part: dict[str, Dense], file: Path, step: Callable[[int], None]) -> str:
    """Write a safetensors file while reading it, which the library would hold in memory. Returns its checksum."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    # In the library's order, by descending alignment, which keeps every tensor aligned.
    ordered = sorted(part.items(), key=lambda item: (-_alignment(item[1]), item[0]))
    for key, place in ordered:
        entries[key] = {"dtype": place.dtype, "shape": place.shape, "data_offsets": [end, end + place.nbytes]}
        end += place.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    digest, pieces = xxhash.xxh3_128(), Pieces()
    with Appender(file) as out:
        head = len(header).to_bytes(8, "little") + header
        digest.update(head)
        out.append(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for key, place in ordered:
            for data in pieces.of(place) if isinstance(place, Place) else place.pieces():
                if not finite_bytes(place.dtype, data):
                    raise CorruptCheckpointError(f"tensor {key} holds NaN or infinity; fetch the checkpoint again")
                digest.update(data.numpy().data)
                out.append(data)
                step(len(data))
    return digest.hexdigest()


def _alignment(place: Dense) -> int:
    count = 1
    for size in place.shape:
        count *= size
    return place.nbytes // count if count else 0

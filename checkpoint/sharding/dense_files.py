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
from checkpoint.manifest import MANIFEST, checksum
from checkpoint.place import Place
from checkpoint.sharding.encoded_weights import NONE_ENCODED, Encoded, write_encoded
from checkpoint.sharding.model_directory import INDEX, cure
from checkpoint.sharding.partial_store import Progress, claim, discard
from checkpoint.sharding.source import Source
from checkpoint.sharding.weights import Dense, Pieces, finite_bytes
from checkpoint.store import ExpertStore, file_checksum
from scheduler.errors import CorruptCheckpointError

_PART_BYTES = 1 << 29


def write_dense(
    source: Source,
    tensors: Mapping[str, Dense],
    dtypes: dict[str, dict[str, str]],
    folder: Path,
    report: Progress,
    encoded: Encoded = NONE_ENCODED,
) -> dict[str, str]:
    """Write the tensors in files of some 512 MiB, and the model's other files. Returns the files' checksums.

    Those that are to be `encoded` have files of their own. Quantised weights are written dequantised, and config.json
    without their format. `dtypes`: see `checkpoint.dense.KEPT_DTYPES`. Memory: 16 MiB at a time, of a quantised weight
    some rows. `report("dense", bytes done, of)`. Raises CorruptCheckpointError, OSError.
    """
    total, done = sum(place.nbytes for place in tensors.values()), 0

    def step(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        report("dense", done, total)

    folder.mkdir()
    sums = write_encoded(encoded, folder, step)
    tensors = {key: place for key, place in tensors.items() if key not in encoded.keys}
    if source.gguf is not None:
        write_settings(source.gguf, folder)
        for file in folder.iterdir():
            _sync(file)
    for file in source.aux_files():
        if file.name == "config.json" and source.config != without_quantisation(source.config):
            write_synced(folder / file.name, _plain_config(source))
        else:
            shutil.copyfile(file, folder / file.name)
            _sync(folder / file.name)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(_parts(tensors)):
        name = f"dense-{number:05d}.safetensors"
        sums[name] = _write_part(part, folder / name, step)
        weight_map.update(dict.fromkeys(part, name))
    plain = sum(place.nbytes for place in tensors.values())
    metadata = {"total_size": plain} | ({KEPT_DTYPES: dtypes} if dtypes else {})
    write_synced(folder / INDEX, json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=1))
    sums |= {file.name: file_checksum(file) for file in folder.iterdir() if file.name not in sums}
    sync_directory(folder)
    return dict(sorted(sums.items()))


def small_contents(source: Source) -> dict[str, bytes]:
    """The content of configuration, tokenizer, templates and generation settings, as the dense part has them:
    config.json is that of the dequantised model. Raises CheckpointError, OSError."""
    found = {file.name: file.read_bytes() for file in source.aux_files()}
    if "config.json" in found and source.config != without_quantisation(source.config):
        found["config.json"] = _plain_config(source)
    return found


def _plain_config(source: Source) -> bytes:
    return json.dumps(without_quantisation(source.config), indent=1).encode()


def refresh(store: ExpertStore, source: Source) -> ExpertStore:
    """Make the store's small files those that the checkpoint has now. Experts and other weights stay.

    Raises CheckpointError, StoreError, OSError. After a crash the next call goes on.
    """
    if source.gguf is not None or not _stale(store, contents := small_contents(source), source):
        return store
    folder = store.path.with_name(f".{store.path.name}.files")
    lock = claim(folder, lambda: False, f"the files of {store.path}", lambda *step: None)
    try:
        store = ExpertStore.open(store.path)
        for name in _stale(store, contents, source):
            if name in contents:
                fresh = store.path / f".{name}.partial"
                write_synced(fresh, contents[name])
                fresh.replace(store.dense / name)
            else:
                (store.dense / name).unlink(missing_ok=True)
        sync_directory(store.dense)
        sums = {name: value for name, value in store.manifest.dense.items() if _is_weights(name)}
        sums |= {name: checksum(data) for name, data in contents.items()}
        fresh = store.path / f".{MANIFEST}.partial"
        write_synced(fresh, replace(store.manifest, config=source.config, dense=dict(sorted(sums.items()))).to_json())
        fresh.replace(store.path / MANIFEST)
        sync_directory(store.path)
    finally:
        discard(folder)
        if lock is not None:
            os.close(lock)
    return ExpertStore.open(store.path)


def _stale(store: ExpertStore, contents: dict[str, bytes], source: Source) -> list[str]:
    """Small files of the store that the checkpoint has otherwise, has not, or that are damaged."""
    listed = {name for name in store.manifest.dense if not _is_weights(name)}
    found = sorted(listed - contents.keys())
    for name, data in contents.items():
        file = store.dense / name
        if store.manifest.dense.get(name) != checksum(data) or not file.is_file() or file.read_bytes() != data:
            found.append(name)
    return found or ["config.json"] * (store.manifest.config != source.config)


def _is_weights(name: str) -> bool:
    return name == INDEX or name.endswith(".safetensors")


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
                    raise CorruptCheckpointError(
                        f"{place.file}: tensor {key} holds NaN or infinity; {cure(place.file)}"
                    )
                digest.update(data.numpy().data)
                out.append(data)
                step(len(data))
    return digest.hexdigest()


def _alignment(place: Dense) -> int:
    count = 1
    for size in place.shape:
        count *= size
    return place.nbytes // count if count else 0

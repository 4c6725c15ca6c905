"""The expert store: one file a layer, one contiguous page-aligned blob an expert, a manifest, and the dense rest.

STORE/
  manifest.json            what is here, with a checksum a blob; written last
  layer-00000.experts      blobs of that layer's experts, each a multiple of 4096 bytes
  dense/                   everything but the experts, as an ordinary Hugging Face directory
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from checkpoint.direct import open_direct, pieces, read_at
from checkpoint.family import DTYPES
from checkpoint.tensors import PAGE, aligned_buffer
from scheduler.errors import CorruptStoreError, StoreError, StoreMismatchError, StoreNotFoundError

FORMAT = 2
MANIFEST = "manifest.json"
DENSE = "dense"


@dataclass(frozen=True)
class TensorSpec:
    """One parameter inside a blob: `offset` bytes from its start, `shape` without the expert dimension."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Blob:
    """One expert's bytes in its layer's file. `checksum` is xxh3-128 of the whole blob, padding included."""

    offset: int
    length: int
    checksum: str


@dataclass(frozen=True)
class LayerSpec:
    """One MoE layer: `module` is the experts module's name in the model."""

    module: str
    file: str
    tensors: tuple[TensorSpec, ...]
    blobs: tuple[Blob, ...]


@dataclass(frozen=True)
class Checked:
    """What a verification has read: blobs, files of the dense part, bytes of both."""

    blobs: int
    files: int
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """What a store holds. `fingerprint` names the checkpoint it came from, `dtype` the experts' own; `dense`: the dense
    part's files and their checksums, no others."""

    format: int
    fingerprint: str
    family: str
    dtype: str
    config: dict[str, Any]
    layers: dict[int, LayerSpec]
    dense: dict[str, str]

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(sorted(self.layers))

    @property
    def blob_bytes(self) -> int:
        """The size of a slot: the largest blob."""
        return max(blob.length for layer in self.layers.values() for blob in layer.blobs)

    @property
    def expert_bytes(self) -> int:
        """All experts together."""
        return sum(blob.length for layer in self.layers.values() for blob in layer.blobs)

    @property
    def experts(self) -> int:
        return max(len(layer.blobs) for layer in self.layers.values())

    def to_json(self) -> str:
        return json.dumps(seal(json.loads(json.dumps(asdict(self)))), indent=1)

    @staticmethod
    def from_json(text: str, where: Path) -> Manifest:
        """Raises CorruptStoreError or StoreMismatchError."""
        try:
            fields = json.loads(text)
            if fields["format"] != FORMAT:
                raise StoreMismatchError(
                    f"{where} has format {fields['format']}, this version reads {FORMAT}; make it again"
                )
            if seal(fields)["checksum"] != fields.pop("checksum"):
                raise CorruptStoreError(f"{where} fails its own checksum; make the store again with odmoe shard")
            layers = {int(k): layer_from(v) for k, v in fields.pop("layers").items()}
            manifest = Manifest(layers=layers, **fields)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise CorruptStoreError(f"{where} is damaged ({error!r}); make the store again with odmoe shard") from error
        _check(manifest, where)
        return manifest


def seal(fields: dict[str, Any]) -> dict[str, Any]:
    """A manifest's fields with the checksum of all others."""
    rest = {name: value for name, value in fields.items() if name != "checksum"}
    return rest | {"checksum": checksum(json.dumps(rest, sort_keys=True).encode())}


def layer_from(fields: dict[str, Any]) -> LayerSpec:
    """What `asdict` made of a LayerSpec, back. Raises KeyError, TypeError or AttributeError."""
    tensors = tuple(TensorSpec(t["name"], t["dtype"], tuple(t["shape"]), t["offset"]) for t in fields["tensors"])
    return LayerSpec(fields["module"], fields["file"], tensors, tuple(Blob(**b) for b in fields["blobs"]))


def _check(manifest: Manifest, where: Path) -> None:
    """A manifest comes from a file that anyone may have written: nothing in it may lead outside."""
    texts = (manifest.fingerprint, manifest.family, manifest.dtype)
    if not all(isinstance(text, str) for text in texts) or manifest.dtype not in DTYPES:
        raise CorruptStoreError(f"{where} has no fingerprint, family or dtype; make the store again")
    if not possible_dense(manifest.dense):
        raise CorruptStoreError(f"{where} names no dense files; make the store again")
    if not isinstance(manifest.config, dict):
        raise CorruptStoreError(f"{where} has no config; make the store again")
    for number, layer in manifest.layers.items():
        if not possible(layer):
            raise CorruptStoreError(f"{where}: the entry of layer {number} is impossible; make the store again")
    if not manifest.layers:
        raise CorruptStoreError(f"{where} lists no layers; make the store again")


def possible(layer: LayerSpec) -> bool:
    """A file of this directory, whole pages of one length, and tensors that lie inside them."""
    if not isinstance(layer.module, str) or not isinstance(layer.file, str) or Path(layer.file).name != layer.file:
        return False
    for blob in layer.blobs:
        if not (_count(blob.offset) and _count(blob.length) and blob.length > 0 and isinstance(blob.checksum, str)):
            return False
    lengths = {blob.length for blob in layer.blobs}
    aligned = all(blob.offset % PAGE == 0 and blob.length % PAGE == 0 for blob in layer.blobs)
    return len(lengths) == 1 and aligned and all(_fits(spec, min(lengths)) for spec in layer.tensors)


def _fits(spec: TensorSpec, length: int) -> bool:
    if not isinstance(spec.name, str) or not isinstance(spec.dtype, str) or spec.dtype not in DTYPES:
        return False
    size = DTYPES[spec.dtype].itemsize
    if not _count(spec.offset) or spec.offset % size or not all(_count(n) for n in spec.shape):
        return False
    return spec.offset + math.prod(spec.shape) * size <= length


def _count(value: object) -> bool:
    return type(value) is int and value >= 0


class ExpertStore:
    """A finished store, open for reading. Only manifest and file sizes have been read."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @staticmethod
    def open(path: Path) -> ExpertStore:
        """Raises StoreNotFoundError, StoreMismatchError or CorruptStoreError."""
        where = path / MANIFEST
        try:
            manifest = Manifest.from_json(where.read_text(), where)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreNotFoundError(f"no expert store at {path}; make one with: odmoe shard MODEL {path}") from error
        except UnicodeDecodeError as error:
            raise CorruptStoreError(f"{where} is damaged ({error}); make the store again") from error
        store = ExpertStore(path, manifest)
        for layer in manifest.layers.values():
            expected = max(blob.offset + blob.length for blob in layer.blobs)
            file = path / layer.file
            actual = file.stat().st_size if file.is_file() else None
            if actual != expected:
                state = "is missing" if actual is None else f"is {actual} bytes, the manifest says {expected}"
                raise CorruptStoreError(f"{file} {state}; make the store again with odmoe shard")
        return store

    @property
    def dense(self) -> Path:
        return self.path / DENSE

    def locate(self, layer: int, expert: int) -> tuple[Path, Blob]:
        """The file and blob of an expert. Raises StoreError for one that does not exist."""
        spec = self.manifest.layers.get(layer)
        if spec is None or not 0 <= expert < len(spec.blobs):
            raise StoreError(f"the store at {self.path} holds no expert {expert} of layer {layer}")
        return self.path / spec.file, spec.blobs[expert]

    def views(self, buffer: torch.Tensor, layer: int) -> dict[str, torch.Tensor]:
        """A blob's parameters as views of `buffer` (uint8, at least the blob's length), without expert dimension."""
        found = {}
        for spec in self.manifest.layers[layer].tensors:
            dtype = DTYPES[spec.dtype]
            size = torch.Size(spec.shape).numel() * dtype.itemsize
            found[spec.name] = buffer[spec.offset : spec.offset + size].view(dtype).view(spec.shape)
        return found

    def verify(self, progress: Callable[[int, int], None] | None = None) -> Checked:
        """Read every blob and the dense part from the disk and compare checksums. Raises CorruptStoreError naming the
        expert and the file."""
        total, done = self.manifest.expert_bytes, 0

        def step(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress:
                progress(done, total)

        try:
            for number, layer in self.manifest.layers.items():
                if fault := blob_fault(self.path, number, layer, step):
                    raise CorruptStoreError(f"{fault}; make the store again with odmoe shard")
            if fault := dense_fault(self.path, self.manifest.dense):
                raise CorruptStoreError(f"{fault}; make the store again")
            dense = [file.stat().st_size for file in self.dense.iterdir()]
        except OSError as error:
            where = error.filename or self.path
            raise CorruptStoreError(f"{where} cannot be read ({error.strerror}); make the store again") from error
        return Checked(sum(len(layer.blobs) for layer in self.manifest.layers.values()), len(dense), total + sum(dense))

    def verify_once(self, stamps: Path, progress: Callable[[int, int], None] | None = None) -> bool:
        """Verify unless these very files (size, inode, change time) passed before. True when it did read them.

        `stamps`: a directory for the record. One that cannot be written costs a verification each time.
        """
        stamp = self._stamp(stamps)
        state = self._state()
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if stamp.read_text() == state:
                return False
        self.verify(progress)
        _record(stamp, state)
        return True

    def trust(self, stamps: Path) -> None:
        """Record these files as verified: this process has written them from what it computed the checksums of."""
        _record(self._stamp(stamps), self._state())

    def _stamp(self, stamps: Path) -> Path:
        return stamps / hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:32]

    def _state(self) -> str:
        files = sorted(p for p in self.path.rglob("*") if p.is_file())
        stats = [(p.name, p.stat()) for p in files]
        return json.dumps([[n, s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns] for n, s in stats])


def blob_fault(folder: Path, number: int, layer: LayerSpec, step: Callable[[int], None]) -> str | None:
    """What is wrong with a layer's file in `folder`, or None. Reads all of it from the disk. Raises OSError.

    `step` is called with each blob's bytes.
    """
    file = folder / layer.file
    buffer = aligned_buffer(max((blob.length for blob in layer.blobs), default=0))
    descriptor = open_direct(file, os.O_RDONLY)
    try:
        for expert, blob in enumerate(layer.blobs):
            data = read_at(descriptor, blob.offset, blob.length, buffer)
            if len(data) != blob.length or checksum(data.numpy().data) != blob.checksum:
                return f"expert {expert} of layer {number} in {file} fails its checksum"
            step(blob.length)
        end = max((blob.offset + blob.length for blob in layer.blobs), default=0)
        size = os.fstat(descriptor).st_size
        return None if size == end else f"{file} is {size} bytes, its blobs are {end}"
    finally:
        os.close(descriptor)


def possible_dense(sums: object) -> bool:
    """Files of one directory, each with a checksum."""
    if not isinstance(sums, dict) or not sums:
        return False
    return all(isinstance(n, str) and Path(n).name == n and isinstance(value, str) for n, value in sums.items())


def dense_fault(folder: Path, sums: dict[str, str]) -> str | None:
    """What is wrong with the dense part of the store in `folder`, or None. Raises OSError."""
    found = {file.name for file in (folder / DENSE).iterdir()} if (folder / DENSE).is_dir() else set()
    if stranger := min(found - sums.keys(), default=None):
        return f"{folder / DENSE / stranger} is none of the store's files"
    for name, value in sums.items():
        file = folder / DENSE / name
        if not file.is_file() or file_checksum(file) != value:
            return f"{file} is missing or fails its checksum"
    return None


def _record(stamp: Path, state: str) -> None:
    with contextlib.suppress(OSError):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        temporary = stamp.with_suffix(f".{os.getpid()}")
        temporary.write_text(state)
        temporary.replace(stamp)


def checksum(data: bytes | memoryview) -> str:
    """xxh3-128 as hex."""
    return xxhash.xxh3_128_hexdigest(data)


def file_checksum(file: Path) -> str:
    """xxh3-128 of a file as hex. Raises OSError."""
    digest = xxhash.xxh3_128()
    for data in pieces(file):
        digest.update(data)
    return digest.hexdigest()

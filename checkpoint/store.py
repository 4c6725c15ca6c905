"""The expert store: one file a layer, one contiguous page-aligned blob an expert, a manifest, and the dense rest.

STORE/
  manifest.json            what is here, with a checksum a blob; written last
  layer-00000.experts      blobs of that layer's experts, each a multiple of 4096 bytes
  int4.json                a form that was added: the same of its files; written last
  layer-00000.int4         that layer's experts in this form, smaller
  dense/                   everything but the experts, as an ordinary Hugging Face directory
  held.json                in a part of a store: the experts whose bytes are here; the files have holes for the others
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash

from checkpoint.direct_io import open_direct, pieces, read_at
from checkpoint.forms import FORMS, planned_form
from checkpoint.held import HELD, read_held
from checkpoint.manifest import DENSE, MANIFEST, Blob, Form, LayerSpec, Manifest, checksum
from checkpoint.tensors import aligned_buffer
from scheduler.errors import CorruptStoreError, NotHeldError, StoreError, StoreNotFoundError
from scheduler.types import ExpertId


@dataclass(frozen=True)
class Checked:
    """Counts of a verification: blobs, files of the dense part, bytes of both."""

    blobs: int
    files: int
    nbytes: int


class ExpertStore:
    """A finished store, open for reading. Only manifest and file sizes have been read."""

    def __init__(self, path: Path, manifest: Manifest, held: frozenset[ExpertId] | None = None) -> None:
        self.path = path
        self.manifest = manifest
        self.held = held
        """The experts whose bytes are here; None: all."""
        self._files: dict[str, Path] = {}
        """Name -> path. To join them at each load takes as long as a small expert's product."""

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
        for layer in manifest.layers.values():
            if fault := size_fault(path, layer):
                if not where.exists():
                    raise removal_error(path)
                raise CorruptStoreError(f"{fault}; make the store again with odmoe shard")
        held = read_held(path, manifest.layers)
        return ExpertStore(path, replace(manifest, forms=_forms(path, manifest)), held)

    @property
    def dense(self) -> Path:
        return self.path / DENSE

    def layers(self, form: str = "") -> dict[int, LayerSpec]:
        """Layouts of a form's files, by layer. Raises StoreError for a form that the store lacks."""
        return self.manifest.form(form).layers if form else self.manifest.layers

    def experts(self, form: str = "") -> Iterator[tuple[ExpertId, Blob]]:
        """Those whose bytes are here, layer by layer. Raises StoreError for a form that the store lacks."""
        for layer, spec in self.layers(form).items():
            for number, blob in enumerate(spec.blobs):
                expert = ExpertId(layer, number)
                if self.held is None or expert in self.held:
                    yield expert, blob

    def locate(self, layer: int, expert: int, form: str = "") -> tuple[Path, Blob]:
        """The file and blob of an expert. Raises StoreError for one that does not exist, NotHeldError for one that is
        not here."""
        spec = self.layers(form).get(layer)
        if spec is None or not 0 <= expert < len(spec.blobs):
            raise StoreError(f"the store at {self.path} holds no expert {expert} of layer {layer}")
        if self.held is not None and (layer, expert) not in self.held:
            raise NotHeldError(
                f"the part of a store at {self.path} does not hold expert {expert} of layer {layer}; it holds "
                f"{len(self.held)} experts, as {self.path / HELD} lists them"
            )
        file = self._files.get(spec.file) or self._files.setdefault(spec.file, self.path / spec.file)
        return file, spec.blobs[expert]

    def views(self, buffer: torch.Tensor, layer: int) -> dict[str, torch.Tensor]:
        """A blob's tensors as views of `buffer` (uint8, at least the blob's length), without expert dimension.

        They are the expert's parameters in a store without an encoding; `ExpertParameters` has them for any store.
        """
        return self.manifest.layers[layer].views(buffer)

    def verify(self, progress: Callable[[int, int], None] | None = None, only: set[str] | None = None) -> Checked:
        """Read every blob, of every form, and the dense part from the disk and compare checksums. Raises
        CorruptStoreError naming the expert and the file.

        `only`: these files alone, by their paths in the store.
        """
        every: list[tuple[Manifest | Form, int, LayerSpec]] = [
            (held, number, layer)
            for held in self._manifests()
            for number, layer in held.layers.items()
            if only is None or layer.file in only
        ]
        read = [blob for _, number, layer in every for e, blob in enumerate(layer.blobs) if self._holds(number, e)]
        total, done = sum(blob.length for blob in read), 0

        def step(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress:
                progress(done, total)

        try:
            for held, number, layer in every:
                if fault := blob_fault(self.path, number, layer, step, self.held):
                    again = "make the store again with odmoe shard"
                    raise CorruptStoreError(
                        f"{fault}; {_again(self.path, held.form) if isinstance(held, Form) else again}"
                    )
            sums = self.manifest.dense if self._has_dense() else {}
            checked = sums if only is None else {n: value for n, value in sums.items() if f"{DENSE}/{n}" in only}
            if sums and (fault := dense_fault(self.path, sums, set(checked))):
                raise CorruptStoreError(f"{fault}; make the store again")
            dense = [(self.dense / name).stat().st_size for name in checked]
        except OSError as error:
            where = error.filename or self.path
            if not (self.path / MANIFEST).exists():
                raise removal_error(self.path) from error
            raise CorruptStoreError(f"{where} cannot be read ({error.strerror}); make the store again") from error
        return Checked(len(read), len(dense), total + sum(dense))

    def verify_once(self, stamps: Path, progress: Callable[[int, int], None] | None = None) -> bool:
        """Verify the files that are not those (size, inode, times, checksums of the manifest) that passed before. True
        if it read any.

        `stamps` is the directory of records. Without write access to it every call verifies.
        """
        stamp = self._stamp(stamps)
        state = self._state()
        passed: dict[str, object] = {}
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads(stamp.read_text())
            passed = found if isinstance(found, dict) else {}
        changed = {name for name, of in state.items() if passed.get(name) != of}
        if not changed and state.keys() == passed.keys():
            return False
        self.verify(progress, changed)
        _record(stamp, json.dumps(state))
        return True

    def trust(self, stamps: Path) -> None:
        """Record these files as verified: this process has just written them, with their checksums."""
        _record(self._stamp(stamps), json.dumps(self._state()))

    def _holds(self, layer: int, expert: int) -> bool:
        return self.held is None or (layer, expert) in self.held

    def _has_dense(self) -> bool:
        """A part of a store may be without: a worker reads none of it."""
        return self.held is None or self.dense.is_dir()

    def _stamp(self, stamps: Path) -> Path:
        return stamps / hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:32]

    def _manifests(self) -> list[Manifest | Form]:
        """What has a file for each layer."""
        return [self.manifest, *self.manifest.forms.values()]

    def _state(self) -> dict[str, list[object]]:
        """What of each file would show a change. Raises StoreNotFoundError."""
        layers = [layer for held in self._manifests() for layer in held.layers.values()]
        wanted = {layer.file: checksum("".join(blob.checksum for blob in layer.blobs).encode()) for layer in layers}
        try:
            files = self.dense.iterdir() if self._has_dense() else ()
            dense = {f"{DENSE}/{file.name}": self.manifest.dense.get(file.name, "") for file in files}
            stats = {name: (self.path / name).stat() for name in sorted(wanted | dense)}
        except FileNotFoundError as error:
            raise removal_error(self.path) from error
        sums = wanted | dense
        return {n: [s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns, sums[n]] for n, s in stats.items()}


def removal_error(folder: Path) -> StoreNotFoundError:
    """The error for a store, or a folder of one, that was there before."""
    return StoreNotFoundError(f"{folder} was removed while this program ran; start it again with a store that stays")


def form_manifest(folder: Path, form: str) -> Path:
    """Path of a form's manifest, which makes the form part of the store."""
    return folder / f"{form}.json"


def _forms(folder: Path, manifest: Manifest) -> dict[str, Form]:
    """The forms added to a store. Raises CorruptStoreError or StoreMismatchError."""
    found = {}
    for name in FORMS:
        where = form_manifest(folder, name)
        try:
            form = Form.from_json(where.read_text(), where)
        except FileNotFoundError:
            continue
        except UnicodeDecodeError as error:
            raise CorruptStoreError(f"{where} is damaged ({error}); {_again(folder, name)}") from error
        if form.form != name or not _belongs(form, manifest):
            raise CorruptStoreError(f"{where} is of other experts than the store's; {_again(folder, name)}")
        for layer in form.layers.values():
            if fault := size_fault(folder, layer):
                raise CorruptStoreError(f"{fault}; {_again(folder, name)}")
        found[name] = form
    return found


def _belongs(form: Form, manifest: Manifest) -> bool:
    """Whether a form holds the experts of this store, in the layout of forms."""
    if (form.fingerprint, form.dtype) != (manifest.fingerprint, manifest.dtype) or form.bits != FORMS[form.form]:
        return False
    return form.layers.keys() == manifest.layers.keys() and all(
        same_places(planned_form(manifest.restored_layout(number), form.form, form.group), layer)
        for number, layer in form.layers.items()
    )


def same_places(one: LayerSpec, other: LayerSpec) -> bool:
    """Whether two layers are equal except for checksums."""
    bare = [replace(layer, blobs=tuple(replace(blob, checksum="") for blob in layer.blobs)) for layer in (one, other)]
    return bare[0] == bare[1]


def _again(folder: Path, form: str) -> str:
    where = form_manifest(folder, form)
    return f"remove {where}, and add the form again with: odmoe shard MODEL {folder} --forms {form}"


def size_fault(folder: Path, layer: LayerSpec) -> str | None:
    """The fault in the size of a layer's file in `folder`, or None."""
    expected = max(blob.offset + blob.length for blob in layer.blobs)
    file = folder / layer.file
    actual = file.stat().st_size if file.is_file() else None
    if actual is None:
        return f"{file} is missing"
    return None if actual == expected else f"{file} is {actual} bytes, the manifest says {expected}"


def blob_fault(
    folder: Path,
    number: int,
    layer: LayerSpec,
    step: Callable[[int], None],
    held: Collection[ExpertId] | None = None,
) -> str | None:
    """The first fault of a layer's file in `folder`, or None. Reads all of it from the disk, or the experts that are
    `held` there. Raises OSError.

    `step` is called with the number of bytes of each blob.
    """
    file = folder / layer.file
    buffer = aligned_buffer(max((blob.length for blob in layer.blobs), default=0))
    descriptor = open_direct(file, os.O_RDONLY)
    try:
        for expert, blob in enumerate(layer.blobs):
            if held is not None and (number, expert) not in held:
                continue
            data = read_at(descriptor, blob.offset, blob.length, buffer)
            if len(data) != blob.length or checksum(data.numpy().data) != blob.checksum:
                return f"expert {expert} of layer {number} in {file} fails its checksum"
            step(blob.length)
        end = max((blob.offset + blob.length for blob in layer.blobs), default=0)
        size = os.fstat(descriptor).st_size
        return None if size == end else f"{file} is {size} bytes, its blobs are {end}"
    finally:
        os.close(descriptor)


def dense_fault(folder: Path, sums: dict[str, str], only: Collection[str] | None = None) -> str | None:
    """The first fault of the dense part of the store in `folder`, or None. `only`: the files that are read; None for
    all. Raises OSError."""
    found = {file.name for file in (folder / DENSE).iterdir()} if (folder / DENSE).is_dir() else set()
    if stranger := min(found - sums.keys(), default=None):
        return f"{folder / DENSE / stranger} is none of the store's files"
    for name, value in sums.items():
        file = folder / DENSE / name
        if not file.is_file() or ((only is None or name in only) and file_checksum(file) != value):
            return f"{file} is missing or fails its checksum"
    return None


def _record(stamp: Path, state: str) -> None:
    with contextlib.suppress(OSError):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        temporary = stamp.with_suffix(f".{os.getpid()}")
        temporary.write_text(state)
        temporary.replace(stamp)


def file_checksum(file: Path) -> str:
    """xxh3-128 of a file as hex. Raises OSError."""
    digest = xxhash.xxh3_128()
    for data in pieces(file):
        digest.update(data)
    return digest.hexdigest()

"""The manifest of a store's experts and dense part, and one for each form added to it."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import xxhash

from checkpoint.family import DTYPES, dtype_name
from checkpoint.native.encoding import SCALES, Shapes
from checkpoint.native.encodings import ENCODINGS
from checkpoint.quantisation import BITS, GROUPS, MXFP4, Quantisation
from checkpoint.tensors import PAGE, round_up
from scheduler.errors import CorruptStoreError, StoreError, StoreMismatchError

FORMAT = 3
OLDEST_FORMAT = 2
"""Format 2 has no encodings, and is otherwise the same."""
ENCODED_DENSE_FORMAT = 4
"""Of a store whose dense part has encoded weights. Otherwise as format 3."""
PLAIN_DENSE = "plain"

MANIFEST = "manifest.json"
DENSE = "dense"
FORM_FORMAT = 1
TENSOR_ALIGN = 64
"""Bytes. A tensor of a blob begins at a multiple of it."""

_INTEGERS = {"uint8": torch.uint8, "int8": torch.int8, "int16": torch.int16}
_STORED = DTYPES | _INTEGERS
"""dtypes in a blob; integers are in encoded weights only."""


def stored_name(dtype: torch.dtype) -> str:
    """The name of a dtype in a blob. Raises CheckpointError."""
    return next((name for name, one in _INTEGERS.items() if one == dtype), None) or dtype_name(dtype)


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

    @property
    def blob_bytes(self) -> int:
        return max(blob.length for blob in self.blobs)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """A blob's tensors as views of `buffer` (uint8, at least the blob's length)."""
        found = {}
        for spec in self.tensors:
            dtype = _STORED[spec.dtype]
            size = torch.Size(spec.shape).numel() * dtype.itemsize
            found[spec.name] = buffer[spec.offset : spec.offset + size].view(dtype).view(spec.shape)
        return found


@dataclass(frozen=True)
class Form:
    """All experts again, with `bits` a weight, quantised in groups of `group` weights (`checkpoint/forms.py`).

    Each layer has another file beside its full one.
    """

    format: int
    form: str
    fingerprint: str
    dtype: str
    bits: int
    group: int
    layers: dict[int, LayerSpec]

    @property
    def blob_bytes(self) -> int:
        return max(layer.blob_bytes for layer in self.layers.values())

    @property
    def expert_bytes(self) -> int:
        return sum(blob.length for layer in self.layers.values() for blob in layer.blobs)

    def to_json(self) -> str:
        return json.dumps(seal(json.loads(json.dumps(asdict(self)))), indent=1)

    @staticmethod
    def from_json(text: str, where: Path) -> Form:
        """Raises CorruptStoreError or StoreMismatchError. Does not check that the form fits its store."""
        again = f"remove it, and add the form again with: odmoe shard MODEL {where.parent} --forms {where.stem}"
        try:
            fields = json.loads(text)
            if fields["format"] != FORM_FORMAT:
                raise StoreMismatchError(
                    f"{where} has format {fields['format']}, this version reads {FORM_FORMAT}; {again}"
                )
            if seal(fields)["checksum"] != fields.pop("checksum"):
                raise CorruptStoreError(f"{where} fails its own checksum; {again}")
            layers = {int(k): layer_from(v) for k, v in fields.pop("layers").items()}
            form = Form(layers=layers, **fields)
            counts = all(type(n) is int and n > 0 for n in (form.bits, form.group))
            if not (counts and layers and all(map(possible, layers.values()))):
                raise CorruptStoreError(f"{where} has entries that are impossible; {again}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise CorruptStoreError(f"{where} is damaged ({error!r}); {again}") from error
        return form


@dataclass(frozen=True)
class Manifest:
    """The contents of a store.

    `fingerprint` identifies its checkpoint, `dtype` is that of the experts when they are computed, `dense` has the
    checksum of every file of the dense part, `forms` are the forms added later, from their own manifests.
    """

    format: int
    fingerprint: str
    family: str
    dtype: str
    config: dict[str, Any]
    layers: dict[int, LayerSpec]
    dense: dict[str, str]
    encoding: str = ""
    """How the experts' weights are stored (`checkpoint/native/`); empty for plain tensors of `dtype`."""
    full: dict[int, tuple[TensorSpec, ...]] = field(default_factory=dict)
    """The layout of a restored expert, for each layer that is encoded."""
    plain_because: str = ""
    """Why the experts are not encoded, though their checkpoint is."""
    quantised_to: str = ""
    """What the experts were quantised to while they were stored (`Quantisation.experts`); empty for published ones."""
    quantised_from: str = ""
    """The format or dtype of the checkpoint before."""
    forms: dict[str, Form] = field(default_factory=dict)
    dense_kept: str = PLAIN_DENSE
    """How linear layers of the dense part are kept (`checkpoint/encoded_dense.py`)."""
    dense_weights: int = 0
    """Elements of the dense weights that are encoded."""
    dense_bytes: int = 0
    """What these take, encoded."""

    @property
    def dense_saved(self) -> int:
        """Bytes that a node needs less for the dense part than if it were plain."""
        return self.dense_weights * DTYPES[self.dtype].itemsize - self.dense_bytes

    @property
    def model_digest(self) -> str:
        """Of the weights, of what they were quantised to, and of config.json: nodes with the same one compute the
        same."""
        dense = self.dense_kept if self.dense_weights and self.dense_kept in BITS else ""
        facts = [self.fingerprint, json.dumps(self.config, sort_keys=True), self.quantised_to, dense]
        return hashlib.sha256(" ".join(filter(None, facts)).encode()).hexdigest()[:32]

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(sorted(self.layers))

    @property
    def blob_bytes(self) -> int:
        """The size of a slot: the largest blob."""
        return max(layer.blob_bytes for layer in self.layers.values())

    def restored_layout(self, layer: int) -> LayerSpec:
        """The layout that a layer's file would have if its experts were not encoded, without checksums."""
        spec = self.layers[layer]
        if layer not in self.full:
            return spec
        length = layout_bytes(self.full[layer])
        blobs = tuple(Blob(expert * length, length, "") for expert in range(len(spec.blobs)))
        return LayerSpec(spec.module, spec.file, self.full[layer], blobs)

    @property
    def described(self) -> str:
        """The encoding in words; empty where there is none."""
        if self.quantised_to:
            return self._quantised
        found = {
            ENCODINGS[self.encoding].described(_shapes(full), _shapes(self.layers[number].tensors))
            for number, full in self.full.items()
        }
        return " and ".join(sorted(found))

    @property
    def _quantised(self) -> str:
        """`int4 of bfloat16, groups of 64`, or `mxfp4 of bfloat16`."""
        name = self.quantised_to.partition("-")[0]
        if name == MXFP4:
            return f"{name} of {self.quantised_from}"
        sizes = set()
        for number, full in self.full.items():
            stored = _shapes(self.layers[number].tensors)
            for weight, (_, shape) in _shapes(full).items():
                if (scales := stored.get(f"{weight}.{SCALES}")) is not None:
                    sizes.add(shape[1] // scales[1][1])
        groups = " and ".join(map(str, sorted(sizes, reverse=True)))
        return f"{name} of {self.quantised_from}, groups of {groups}"

    @property
    def restored_bytes(self) -> int:
        """The size of the largest expert when it is computed."""
        return max(self.restored_layout(layer).blob_bytes for layer in self.layers)

    def form_bytes(self, form: str) -> int:
        """The size of a slot for a form; the full one has the empty name. Raises StoreError for a missing form."""
        return self.form(form).blob_bytes if form else self.blob_bytes

    def form(self, form: str) -> Form:
        """Raises StoreError for a form that is not here."""
        found = self.forms.get(form)
        if found is None:
            have = f"it has {', '.join(self.forms)}" if self.forms else "it has none but the full one"
            raise StoreError(
                f"the store has no experts in form {form!r}, {have}; add it with: "
                f"odmoe shard MODEL STORE --forms {form}"
            )
        return found

    @property
    def expert_bytes(self) -> int:
        """All experts together."""
        return sum(blob.length for layer in self.layers.values() for blob in layer.blobs)

    @property
    def experts(self) -> int:
        return max(len(layer.blobs) for layer in self.layers.values())

    def to_json(self) -> str:
        """Without the forms."""
        fields = asdict(replace(self, forms={}))
        del fields["forms"]
        if not self.quantised_to:  # so that earlier versions read what they can
            del fields["quantised_to"], fields["quantised_from"]
        if self.dense_kept == PLAIN_DENSE:  # so that earlier versions read it
            del fields["dense_kept"], fields["dense_weights"], fields["dense_bytes"]
        else:
            fields["format"] = ENCODED_DENSE_FORMAT
        return json.dumps(seal(json.loads(json.dumps(fields))), indent=1)

    @staticmethod
    def from_json(text: str, where: Path) -> Manifest:
        """Raises CorruptStoreError or StoreMismatchError."""
        try:
            fields = json.loads(text)
            if fields["format"] not in (OLDEST_FORMAT, FORMAT, ENCODED_DENSE_FORMAT):
                raise StoreMismatchError(
                    f"{where} has format {fields['format']}, this version reads {OLDEST_FORMAT} to "
                    f"{ENCODED_DENSE_FORMAT}; make it again"
                )
            if seal(fields)["checksum"] != fields.pop("checksum"):
                raise CorruptStoreError(f"{where} fails its own checksum; make the store again with odmoe shard")
            layers = {int(k): layer_from(v) for k, v in fields.pop("layers").items()}
            full = {int(k): tuple(map(_tensor_from, v)) for k, v in fields.pop("full", {}).items()}
            manifest = Manifest(layers=layers, full=full, forms={}, **fields)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise CorruptStoreError(f"{where} is damaged ({error!r}); make the store again with odmoe shard") from error
        _check(manifest, where)
        return manifest


def seal(fields: dict[str, Any]) -> dict[str, Any]:
    """A manifest's fields with the checksum of all others."""
    rest = {name: value for name, value in fields.items() if name != "checksum"}
    return rest | {"checksum": checksum(json.dumps(rest, sort_keys=True).encode())}


def layer_from(fields: dict[str, Any]) -> LayerSpec:
    """A LayerSpec from its `asdict` fields. Raises KeyError, TypeError or AttributeError."""
    tensors = tuple(map(_tensor_from, fields["tensors"]))
    return LayerSpec(fields["module"], fields["file"], tensors, tuple(Blob(**b) for b in fields["blobs"]))


def _tensor_from(fields: dict[str, Any]) -> TensorSpec:
    return TensorSpec(fields["name"], fields["dtype"], tuple(fields["shape"]), fields["offset"])


def layout_bytes(tensors: tuple[TensorSpec, ...]) -> int:
    """The length of a blob that has these tensors."""
    return round_up(max((spec.offset + _nbytes(spec) for spec in tensors), default=0))


def _check(manifest: Manifest, where: Path) -> None:
    """Check that a manifest, an untrusted file, refers to nothing outside its store. Raises CorruptStoreError."""
    texts = (manifest.fingerprint, manifest.family, manifest.dtype)
    if not all(isinstance(text, str) for text in texts) or manifest.dtype not in DTYPES:
        raise CorruptStoreError(f"{where} has no fingerprint, family or dtype; make the store again")
    if not possible_dense(manifest.dense):
        raise CorruptStoreError(f"{where} names no dense files; make the store again")
    if not (_count(manifest.dense_weights) and _count(manifest.dense_bytes) and isinstance(manifest.dense_kept, str)):
        raise CorruptStoreError(f"{where} does not say how dense weights are kept; make the store again")
    if not isinstance(manifest.config, dict):
        raise CorruptStoreError(f"{where} has no config; make the store again")
    for number, layer in manifest.layers.items():
        if not possible(layer):
            raise CorruptStoreError(f"{where}: the entry of layer {number} is impossible; make the store again")
    if not manifest.layers:
        raise CorruptStoreError(f"{where} lists no layers; make the store again")
    if not _possible_encoding(manifest):
        raise CorruptStoreError(
            f"{where}: encoding {manifest.encoding!r:.40} does not fit the layers, or this version does not know it; "
            "make the store again"
        )
    for number in manifest.layers:
        for spec in manifest.restored_layout(number).tensors:
            if spec.dtype not in (manifest.dtype, "float32"):  # some families keep a parameter in float32
                raise CorruptStoreError(
                    f"{where} says {manifest.dtype}, but {spec.name} of the experts of layer {number} is {spec.dtype}; "
                    f"remove {where.parent}, and make the store again"
                )


def _possible_encoding(manifest: Manifest) -> bool:
    """Whether each encoded layer can be restored: all parameters are there, as they are or encoded."""
    if not isinstance(manifest.encoding, str) or not isinstance(manifest.plain_because, str):
        return False
    if not _possible_quantisation(manifest):
        return False
    if bool(manifest.encoding) != bool(manifest.full) or not manifest.full.keys() <= manifest.layers.keys():
        return False
    if not manifest.encoding:
        return True
    encoding = ENCODINGS.get(manifest.encoding)
    return encoding is not None and all(
        _possible_layout(full)
        and all(spec.dtype in DTYPES for spec in full)
        and encoding.fits(_shapes(full), _shapes(manifest.layers[number].tensors))
        for number, full in manifest.full.items()
    )


def _possible_quantisation(manifest: Manifest) -> bool:
    to, made_from = manifest.quantised_to, manifest.quantised_from
    if not isinstance(to, str) or not isinstance(made_from, str) or bool(to) != bool(made_from):
        return False
    known = {MXFP4, *(Quantisation(*one).experts for one in product(BITS, GROUPS))}
    return not to or (bool(manifest.encoding) and to in known)


def _possible_layout(tensors: tuple[TensorSpec, ...]) -> bool:
    """Whether the tensors of a blob, which an untrusted manifest lists, lie behind one another without great gaps."""
    end = 0
    for spec in tensors:
        if not _possible_tensor(spec) or not end <= spec.offset <= round_up(end, TENSOR_ALIGN):
            return False
        end = spec.offset + _nbytes(spec)
    return len({spec.name for spec in tensors}) == len(tensors)


def _possible_tensor(spec: TensorSpec) -> bool:
    if not isinstance(spec.name, str) or not isinstance(spec.dtype, str) or spec.dtype not in _STORED:
        return False
    if not _count(spec.offset) or not all(_count(n) and n > 0 for n in spec.shape):
        return False
    return spec.offset % _STORED[spec.dtype].itemsize == 0


def _nbytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * _STORED[spec.dtype].itemsize


def _shapes(tensors: tuple[TensorSpec, ...]) -> Shapes:
    return {spec.name: (spec.dtype, spec.shape) for spec in tensors}


def possible(layer: LayerSpec) -> bool:
    """Whether a layer is a file of this directory, with blobs of whole pages, and tensors inside them."""
    if not isinstance(layer.module, str) or not isinstance(layer.file, str) or Path(layer.file).name != layer.file:
        return False
    for blob in layer.blobs:
        if not (_count(blob.offset) and _count(blob.length) and blob.length > 0 and isinstance(blob.checksum, str)):
            return False
    lengths = {blob.length for blob in layer.blobs}
    aligned = all(blob.offset % PAGE == 0 and blob.length % PAGE == 0 for blob in layer.blobs)
    if len(lengths) != 1 or not aligned or not _possible_layout(layer.tensors):
        return False
    return layout_bytes(layer.tensors) <= min(lengths)


def _count(value: object) -> bool:
    return type(value) is int and value >= 0


def possible_dense(sums: object) -> bool:
    """Whether these are files of one directory, each with a checksum."""
    if not isinstance(sums, dict) or not sums:
        return False
    return all(isinstance(n, str) and Path(n).name == n and isinstance(value, str) for n, value in sums.items())


def checksum(data: bytes | memoryview) -> str:
    """xxh3-128 as hex."""
    return xxhash.xxh3_128_hexdigest(data)


class RunningChecksum:
    """`checksum` of bytes that come in pieces."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self.add = self._digest.update
        self.hex = self._digest.hexdigest

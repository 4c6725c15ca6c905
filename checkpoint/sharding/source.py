"""A Hugging Face model directory, or a GGUF file, whose files are checked before they are read."""

from __future__ import annotations

import hashlib
import json
import operator
import os
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from checkpoint.direct_io import pieces
from checkpoint.formats.gguf_file import GgufFile, is_gguf, read_gguf
from checkpoint.hub import nearest
from checkpoint.sharding.model_directory import (
    INDEX,
    check_adapter,
    check_config,
    check_link,
    check_pointer,
    cure,
    small_files,
)
from scheduler.errors import CheckpointError, CorruptCheckpointError, MissingShardError

_SINGLE = "model.safetensors"
FEW = 8
"""So many models of a directory are named in a message."""
_MAX_HEADER = 100_000_000
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_SAMPLES = 256
_SAMPLE_BYTES = 512


@dataclass(frozen=True)
class Source:
    """A checked model directory, or GGUF file. `files` maps a tensor's name to the file that holds it."""

    path: Path
    config: dict[str, Any]
    files: dict[str, Path]
    fingerprint: str
    stamp: str = field(repr=False)
    dtype: str = "float32"
    """That of most weights that are not quantised. gpt-oss-20b's config.json names none."""
    gguf: GgufFile | None = field(default=None, repr=False)
    """The file, if this is no directory."""

    def weight_files(self) -> list[Path]:
        """Every safetensors file, once, in name order."""
        return sorted(set(self.files.values()))

    def aux_files(self) -> list[Path]:
        """Configuration, tokenizer, templates and generation settings, as they are now. A GGUF file has them in itself.

        Raises CheckpointError for a link that leads out of the model."""
        return [] if self.gguf is not None else small_files(self.path)


def _instead(path: Path) -> str:
    """What to give in place of a directory without a model."""
    try:
        models = sorted(str(file.parent) for file in path.glob("*/config.json"))
    except OSError:
        models = []
    if not models:
        return "give one that has"
    more = f" or {len(models) - FEW} more" if len(models) > FEW else ""
    return f"give one of the models in it: {', '.join(models[:FEW])}{more}"


def open_source(path: Path) -> Source:
    """Check a model directory: all files exist and have the length of their headers. Or a GGUF file.

    Raises CheckpointError, MissingShardError, CorruptCheckpointError or UnsupportedFormatError. Reads headers only.
    """
    if is_gguf(path):
        return _open_gguf(path)
    if not path.is_dir():
        near = nearest(path)
        hint = f"; did you mean {near}?" if near is not None else ""
        raise CheckpointError(
            f"model {str(path)!r} is not a directory; give one that holds config.json and safetensors{hint}"
        )
    if not (path / "config.json").is_file():
        raise MissingShardError(f"{path} has no config.json, so it is no model directory; {_instead(path)}")
    check_adapter(path)
    for file in small_files(path):
        check_pointer(file)
    config = _read_json(path / "config.json")
    listed = _listed_files(path)
    files: dict[str, Path] = {}
    shapes: list[list[int]] = []
    sizes = dict.fromkeys(_DTYPES, 0)
    stamp = hashlib.sha256(str(path.resolve()).encode())
    for name in sorted(set(listed.values())):
        file = path / name
        check_link(path, file)
        header, _ = read_header(file)
        status = file.stat()
        stamp.update(f"{name}:{status.st_size}:{status.st_mtime_ns}".encode())
        files.update({key: file for key in header if key != "__metadata__"})
        for entry in (value for key, value in header.items() if key != "__metadata__"):
            shapes.append(_shape(file, entry))
            if entry["dtype"] in sizes:
                sizes[entry["dtype"]] += entry["data_offsets"][1] - entry["data_offsets"][0]
    lost = sorted(key for key in listed if key != "*" and key not in files)
    if lost:
        raise MissingShardError(
            f"{path / INDEX} names tensor {lost[0]!r}, but {listed[lost[0]]} does not hold it; {cure(path)}"
        )
    check_config(path / "config.json", config, shapes)
    fingerprint = sampled_fingerprint(config, (path / name for name in listed.values()))
    stamp.update(bytes.fromhex(fingerprint))
    dtype = _DTYPES[max(sizes, key=lambda word: sizes[word])]
    return Source(path, config, files, fingerprint[:32], stamp.hexdigest()[:32], dtype)


def _shape(file: Path, entry: dict[str, Any]) -> list[int]:
    """A tensor's shape. Raises CorruptCheckpointError."""
    shape = entry.get("shape")
    if not isinstance(shape, list) or any(type(length) is not int or length < 0 for length in shape):
        raise CorruptCheckpointError(f"{file} has a damaged header (shape {str(shape)[:40]}); {cure(file)}")
    return shape


def sampled_fingerprint(config: dict[str, Any], files: Iterable[Path]) -> str:
    """A digest of a configuration, and of headers and samples of the weight files, in 64 hex digits."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in sorted(set(files)):
        digest.update(file.name.encode() + read_header(file)[1] + _sample(file))
    return digest.hexdigest()


def _open_gguf(path: Path) -> Source:
    if path.is_file():
        check_pointer(path)
    found = read_gguf(path)
    check_config(path, found.config, [tensor.shape for tensor in found.tensors.values()])
    with path.open("rb") as stream:
        digest = hashlib.sha256(stream.read(found.data_start) + _sample(path))
    status = path.stat()
    stamp = hashlib.sha256(f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}".encode() + digest.digest())
    files = dict.fromkeys(found.tensors, path)
    names = digest.hexdigest()[:32], stamp.hexdigest()[:32]
    return Source(path, found.config, files, *names, found.dtype, found)


def _sample(file: Path) -> bytes:
    """Bytes from all over a weight file. Trainings of one architecture have the same header but other weights."""
    size = file.stat().st_size
    step = max(size // _SAMPLES, 1)
    with file.open("rb") as stream:
        return b"".join(os.pread(stream.fileno(), _SAMPLE_BYTES, at) for at in range(0, size, step))


def _listed_files(path: Path) -> dict[str, str]:
    """Tensor name -> file name from the index, or {"*": the single file}, which wins, as in Transformers."""
    if (path / _SINGLE).is_file():
        return {"*": _SINGLE}
    if (path / INDEX).is_file():
        weight_map = _read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CorruptCheckpointError(f"{path / INDEX} has no weight_map; {cure(path)}")
        wrong = [v for v in weight_map.values() if not isinstance(v, str) or Path(v).name != v]
        if wrong:
            raise CorruptCheckpointError(f"{path / INDEX} names {wrong[0]!r}, not a file beside it; {cure(path)}")
        for name in sorted(set(weight_map.values())):
            if not (path / name).is_file():
                raise MissingShardError(f"{path / INDEX} names {name}, which is not there; {cure(path)}")
        return weight_map
    if (path / INDEX).exists():
        raise CheckpointError(f"{path / INDEX} is not a file; {cure(path)}")
    if any(path.glob("*.bin")):
        raise CheckpointError(f"{path} holds PyTorch .bin weights only; convert them to safetensors")
    raise MissingShardError(f"{path} holds neither {_SINGLE} nor {INDEX}")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise MissingShardError(f"{file} is missing") from error
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{file} is not valid JSON ({error}); {cure(file)}") from error
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{file} holds a {type(found).__name__}, not an object; {cure(file)}")
    return found


def read_header(file: Path) -> tuple[dict[str, Any], bytes]:
    """A safetensors header, checked against the file's length."""
    check_pointer(file)
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER + 1
        if length > min(_MAX_HEADER, size):
            raise CorruptCheckpointError(f"{file} is not a whole safetensors file ({size} bytes); {cure(file)}")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        spans = [[operator.index(at) for at in v["data_offsets"]] for k, v in header.items() if k != "__metadata__"]
        end = max((span[1] for span in spans), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CorruptCheckpointError(f"{file} has a damaged header ({error}); {cure(file)}") from error
    if 8 + length + end != size:
        raise CorruptCheckpointError(
            f"{file} is {size} bytes, its header says {8 + length + end}: truncated or damaged; {cure(file)}"
        )
    try:
        with safe_open(file, framework="np"):  # reads the header, and checks every span, dtype and shape
            pass
    except SafetensorError as error:
        raise CorruptCheckpointError(f"{file} has a damaged header ({error}); {cure(file)}") from error
    return header, raw


def published_digests(source: Source) -> dict[Path, str]:
    """Published SHA-256 digests of the weight files: from SHA256SUMS, or from the names of Hub blobs."""
    found: dict[Path, str] = {}
    sums = (source.path.parent if source.gguf else source.path) / "SHA256SUMS"
    if sums.is_file():
        for line in sums.read_text(errors="replace").splitlines():
            digest, _, name = line.partition(" ")
            if line.strip() and not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
                raise CorruptCheckpointError(f"{sums} holds a line that is no SHA-256 and file name; {cure(sums)}")
            file = sums.parent / name.strip().removeprefix("*")
            if line.strip() and (file == source.path or not source.gguf):
                found[file] = digest.lower()
    for file in source.weight_files():
        blob = file.resolve().name
        if file.is_symlink() and re.fullmatch(r"[0-9a-f]{64}", blob):
            found.setdefault(file, blob)
    return found


def verify_bytes(source: Source, progress: Callable[[int, int], None] | None = None) -> bool:
    """Compare weight files with their published digests. False if there are none.

    `progress(bytes read, of)`. Raises CorruptCheckpointError, MissingShardError naming the file.
    """
    digests = published_digests(source)
    total, done = sum(file.stat().st_size for file in digests if file.is_file()), 0
    for file, expected in digests.items():
        if not file.is_file():
            raise MissingShardError(f"{source.path / 'SHA256SUMS'} names {file.name}, which is not there")
        digest = hashlib.sha256()
        for data in pieces(file):
            digest.update(data)
            done += len(data)
            if progress:
                progress(done, total)
        if (actual := digest.hexdigest()) != expected:
            raise CorruptCheckpointError(
                f"{file} has SHA-256 {actual[:16]}..., published as {expected[:16]}...; {cure(file)}"
            )
    return bool(digests)

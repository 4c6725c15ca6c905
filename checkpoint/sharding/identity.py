"""What a store is named by: the weights, and the structure of the model that they become. Neither the directory, nor
the files of text and generation that lie beside the weights."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint import family
from checkpoint.direct_io import pieces
from checkpoint.formats.settings import quantisation_settings
from checkpoint.sharding.source import Source, sampled_fingerprint
from scheduler.errors import CorruptCheckpointError

Progress = Callable[[int, int], None]
"""(bytes read, of)."""

_known: dict[tuple[object, ...], str] = {}
"""Digests of files that this process has read, by path, size, inode and times."""


def weights_digest(source: Source, progress: Progress | None = None, records: Path | None = None) -> str:
    """A digest of every byte of the weight files, in 32 hex digits.

    A file of the Hub cache is named by its digest. Any other is read, once: `records` is a folder that keeps digests
    for as long as a file's size, inode and times stay. Raises OSError, CorruptCheckpointError.
    """
    files = source.weight_files()
    unread = [file for file in files if _recorded(file, records) is None]
    total, done = sum(file.stat().st_size for file in unread), 0
    for file in unread:
        state, digest = _state(file), hashlib.sha256()
        for data in pieces(file):
            digest.update(data)
            done += len(data)
            if progress:
                progress(done, total)
        if _state(file) != state:
            raise CorruptCheckpointError(f"{file} has changed while it was read; try again when nobody writes to it")
        _known[state] = digest.hexdigest()
    if records is not None:
        for file in files:
            _record(records, _state(file))
    lines = [f"{file.name} {_recorded(file, records)}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def is_read(source: Source, records: Path | None) -> bool:
    """Whether `weights_digest` would read nothing."""
    return all(_recorded(file, records) is not None for file in source.weight_files())


def _recorded(file: Path, records: Path | None) -> str | None:
    blob = file.resolve()
    if file.is_symlink() and blob.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", blob.name):
        return blob.name
    state = _state(file)
    if state not in _known and records is not None:
        with contextlib.suppress(OSError, ValueError):
            found = _record_of(records, state).read_text().strip()
            if re.fullmatch(r"[0-9a-f]{64}", found):
                _known[state] = found
    return _known.get(state)


def _state(file: Path) -> tuple[object, ...]:
    status = file.stat()
    return str(file.resolve()), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _record_of(records: Path, state: tuple[object, ...]) -> Path:
    return records / hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]


def _record(records: Path, state: tuple[object, ...]) -> None:
    file = _record_of(records, state)
    with contextlib.suppress(OSError):  # without it the file is read again
        if state not in _known or file.exists():
            return
        records.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(f".{os.getpid()}")
        fresh.write_text(_known[state])
        fresh.replace(file)


def structure(config: dict[str, Any]) -> str:
    """A digest of what the experts' and other weights become under this config.json, in 32 hex digits: the family's
    class, the shape of every parameter, and how the checkpoint is quantised. Raises CheckpointError."""
    return _structure(json.dumps(config, sort_keys=True))


@functools.lru_cache(maxsize=16)
def _structure(config_json: str) -> str:
    import torch

    fields = json.loads(config_json)
    model = family.meta_model(family.config_from_dict(fields), torch.float32)
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    experts = {layer: name for layer, (name, _) in family.experts_modules(model).items()}
    facts = [type(model).__name__, shapes, experts, quantisation_settings(fields)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def is_made_of(fingerprint: str, config: dict[str, Any], source: Source, progress: Progress | None = None) -> bool:
    """Whether a store with this fingerprint and config.json has the weights of `source`. Raises CheckpointError and
    OSError.

    Stores of earlier versions have the checkpoint's sampled fingerprint, which depends on config.json too.
    """
    former = source.fingerprint
    if source.gguf is None and config != source.config:
        former = sampled_fingerprint(config, source.weight_files())[:32]
    if fingerprint != former and fingerprint != weights_digest(source, progress):
        return False
    return config == source.config or structure(config) == structure(source.config)

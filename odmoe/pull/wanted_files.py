"""Which files of a Hub repository a model needs."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from checkpoint.hub import OTHERS, SMALL_FILES
from checkpoint.sharding.model_directory import INDEX
from scheduler.errors import CheckpointError, UnsupportedFormatError

SINGLE = "model.safetensors"
_QUANTISATION = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|BF16|F16|F32|MXFP4\w*))(?:-\d{5}-of-\d{5})?\.gguf$", re.I)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. `digest`: its SHA-256 if it is kept as LFS; `key`: its name in the Hub's cache."""

    name: str
    bytes: int
    key: str
    digest: str | None


def small_files(files: Sequence[HubFile]) -> list[HubFile]:
    """Configuration, tokenizer and templates: what `find_model` fetches."""
    return [one for one in files if _matches(one.name, SMALL_FILES) and not _matches(one.name, OTHERS)]


def weight_files(files: Sequence[HubFile], indexed: Collection[str]) -> list[HubFile]:
    """The one safetensors file, or those that the index names. Copies in other formats are left out.

    Raises UnsupportedFormatError if the repository has other formats alone, CheckpointError if it lacks a file.
    """
    by_name = {one.name: one for one in files}
    if SINGLE in by_name:
        return [by_name[SINGLE]]
    if missing := sorted(set(indexed) - by_name.keys()):
        raise CheckpointError(f"{INDEX} names {missing[0]}, which the repository has not; tell its owner")
    if indexed:
        return [by_name[name] for name in sorted(indexed)]
    kinds = quantisations(files)
    if kinds:
        raise UnsupportedFormatError(
            f"the repository has GGUF files, each a whole model; name one quantisation, such as NAME:{kinds[0]} "
            f"({', '.join(kinds)})"
        )
    others = sorted({PurePosixPath(one.name).suffix for one in files} & {".bin", ".pth", ".pt", ".h5", ".msgpack"})
    raise UnsupportedFormatError(
        f"the repository has no safetensors{' but ' + ', '.join(others) if others else ''}; use one that has"
    )


def gguf_files(files: Sequence[HubFile], quantisation: str) -> list[HubFile]:
    """The file of one quantisation, or its parts. Raises CheckpointError."""
    wanted = quantisation.lower()
    found = [one for one in files if (kind := quantisation_of(one.name)) is not None and kind.lower() == wanted]
    if not found:
        kinds = quantisations(files)
        has = f"it has {', '.join(kinds)}" if kinds else "it has no GGUF files"
        raise CheckpointError(f"the repository has no quantisation {quantisation!r}; {has}")
    return sorted(found, key=lambda one: one.name)


def quantisations(files: Sequence[HubFile]) -> list[str]:
    """Those of a repository of GGUF files, the smallest first."""
    total: dict[str, int] = {}
    for one in files:
        if (kind := quantisation_of(one.name)) is not None:
            total[kind] = total.get(kind, 0) + one.bytes
    return sorted(total, key=lambda kind: total[kind])


def quantisation_of(name: str) -> str | None:
    """Of a GGUF file, by its name; None if that has none, and for the file of an image encoder."""
    found = _QUANTISATION.search(PurePosixPath(name).name)
    return None if found is None or "mmproj" in name else found[1].upper()


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

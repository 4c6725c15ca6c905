"""What is checked of a model directory before any of its tensors is read: links, git-lfs pointers, adapters, and
whether the sizes in config.json can be those of the weights."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler.errors import CheckpointError, CorruptCheckpointError, MissingShardError

INDEX = "model.safetensors.index.json"
SMALL_SUFFIXES = (".json", ".model", ".jinja", ".txt", ".tiktoken")
"""Of configuration, tokenizer and template files."""
ADAPTER = "adapter_config.json"
_LFS = b"version https://git-lfs.github.com/spec/"
_MOST_NESTED = 64
_DEPTH = re.compile(r"^(?!.*(size|theta|base|token|_id)).*(layer|block|depth|dense_replace)")
_WIDTH = re.compile(r"^(?!.*vocab).*_(size|dim|rank|heads|groups|channels|features)$")
_PLAUSIBLE_DEPTH, _PLAUSIBLE_EXPERTS, _PLAUSIBLE_WIDTH = 256, 4096, 1 << 22
"""Never refused: an encoder of images, whose weights may not be in the files, has such sizes too."""
_PACKED = 32
"""Numbers of one bit in an element."""


def is_download(path: Path) -> bool:
    """Whether a model directory, or a file in one, was fetched from the Hub: into its cache or by its client."""
    folders = [path, path.parent]
    cached = any(folder.parent.name == "snapshots" for folder in folders)
    return cached or any((folder / ".cache" / "huggingface").is_dir() for folder in folders)


def cure(path: Path) -> str:
    """What to do about a model directory, or a file in one, that is damaged."""
    return "fetch it again" if is_download(path) else "give a whole copy of it"


def small_files(folder: Path) -> list[Path]:
    """Configuration, tokenizer, templates and generation settings, in name order. Raises as `check_link`."""
    found = [file for file in folder.iterdir() if file.suffix in SMALL_SUFFIXES and file.name != INDEX]
    for file in found:
        check_link(folder, file)
    return sorted(file for file in found if file.is_file())


def check_link(folder: Path, file: Path) -> None:
    """Raises CheckpointError for a link that leads out of the model: its content would be copied into the store, and to
    every host. Allowed are the Hub cache's own files, and those of another model directory."""
    if not file.is_symlink():
        return
    root, real = folder.resolve(), file.resolve()
    blobs = [parent / "blobs" for parent in root.parents[:2]]
    if not real.exists():
        raise MissingShardError(f"{file} is a link to {real}, which is not there; {cure(folder)}")
    if real.is_relative_to(root) or real.parent in blobs or _is_model(real.parent):
        return
    raise CheckpointError(
        f"{file} is a link to {real}, outside of the model's directory; put a copy of it there, or remove the link"
    )


def _is_model(folder: Path) -> bool:
    try:
        return "model_type" in json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def check_pointer(file: Path) -> None:
    """Raises CorruptCheckpointError if git-lfs has left its pointer in place of the file."""
    with file.open("rb") as stream:
        if stream.read(len(_LFS)) == _LFS:
            raise CorruptCheckpointError(
                f"{file} is a git-lfs pointer, not the file itself; run git lfs pull in {file.parent}"
            )


def check_adapter(folder: Path) -> None:
    """Raises CheckpointError for an adapter (LoRA) in the directory, which nothing here would apply."""
    file = folder / ADAPTER
    if not file.is_file():
        return
    try:
        base = json.loads(file.read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        base = None
    weights = sorted(one.name for one in folder.glob("adapter_model.*"))
    raise CheckpointError(
        f"{folder} holds an adapter ({', '.join([ADAPTER, *weights])}){f' of {base}' if base else ''}, which is not "
        "applied here; merge it into the model (merge_and_unload of the package peft) and give the merged model, or "
        "move the adapter's files elsewhere to run the model without it"
    )


def check_config(file: Path, config: Mapping[str, Any], shapes: Collection[Sequence[int]]) -> None:
    """Compare config.json with the shapes of the tensors in the files, before anything is built of it: a model of 10^9
    layers would be built until memory ends.

    Raises CorruptCheckpointError for more layers or experts than there can be, or a width beyond any dimension.
    """
    count, longest = len(shapes), max((max(shape, default=1) for shape in shapes), default=1)
    for name, value in _numbers(file, config, 0):
        if _DEPTH.search(name):
            most, what = max(count, _PLAUSIBLE_DEPTH), f"{count} tensors"
        elif name.endswith("_experts"):
            most, what = max(count, longest, _PLAUSIBLE_EXPERTS), f"{count} tensors, none longer than {longest}"
        elif _WIDTH.search(name):
            most, what = max(_PACKED * longest, _PLAUSIBLE_WIDTH), f"no tensor longer than {longest}"
        else:
            continue
        if abs(value) > most:
            raise CorruptCheckpointError(
                f"{file} has {name} {str(value)[:24]}, and the weight files hold {what}; give the config.json that "
                "belongs to them"
            )


def _numbers(file: Path, value: Any, depth: int, name: str = "") -> Iterator[tuple[str, int]]:
    """Every whole number in config.json with its key. Raises CorruptCheckpointError for one that is nested deeply."""
    if depth > _MOST_NESTED:
        raise CorruptCheckpointError(f"{file} is nested more than {_MOST_NESTED} levels deep; {cure(file)}")
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _numbers(file, one, depth + 1, key)
    elif isinstance(value, list):
        for one in value:
            yield from _numbers(file, one, depth + 1, name)
    elif type(value) is int:
        yield name, value

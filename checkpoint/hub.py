"""Models by name: a directory here, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import difflib
import glob
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoint.models_folder import named_model
from checkpoint.sharding.model_directory import INDEX, SMALL_SUFFIXES, check_adapter
from scheduler.errors import CheckpointError, UnsupportedFormatError

SMALL_FILES = tuple(f"*{suffix}" for suffix in SMALL_SUFFIXES)
OTHERS = ("*/*", "consolidated*", "pytorch_model*", "tf_model*", "flax_model*", "*.ggml.*", "*.onnx*")
"""What is not read: folders such as `original/`, and the weights, and their indices, of other formats."""


def find_model(name: str, files: Sequence[str] | None = None, download: bool = True) -> Path:
    """A path, which may not exist, or is a GGUF file; a name in the models folder; or the snapshot of a Hub repository
    (`org/name`), with what a model needs of it, or those `files` (patterns). Without `download`, only the local Hub
    cache is searched. HF_HOME and HF_HUB_OFFLINE apply.

    Raises CheckpointError, or UnsupportedFormatError for directories and repositories of GGUF files.
    """
    path = Path(os.path.expanduser(name))
    if not path.exists() and (named := named_model(name)) is not None:
        path = named
    _check_gguf(path)
    if path.exists() or name.count("/") != 1 or path.suffix in (".json", ".gguf") or name.startswith((".", "/", "~")):
        return path
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if name.lower().endswith("gguf"):
        raise UnsupportedFormatError(
            f"model {name!r} is, by its name, a repository of GGUF files; download one of them and give that, or the "
            "repository that they were made from"
        )
    try:
        return _snapshot(name, files, download) if files is not None or not download else _model_snapshot(name)
    except HFValidationError as error:
        raise _missing(name, path, "no name of a Hub repository") from error
    except LocalEntryNotFoundError as error:
        raise _missing(name, path, "not in the local Hub cache, and the Hub cannot be reached") from error
    except HfHubHTTPError as error:
        raise _missing(name, path, "no Hub repository that can be read") from error
    except OSError as error:
        raise _missing(name, path, f"not to be had from the Hub ({error})") from error


def _snapshot(name: str, files: Sequence[str] | None, download: bool = True, **more: Any) -> Path:
    from huggingface_hub import snapshot_download

    wanted = None if files is None else list(files)
    return Path(snapshot_download(name, allow_patterns=wanted, local_files_only=not download, **more))


def _model_snapshot(name: str) -> Path:
    """Configuration, tokenizer and templates first; then the weights: the one file, or those that the index names."""
    folder = _snapshot(name, SMALL_FILES, ignore_patterns=list(OTHERS))
    check_adapter(folder)
    same: dict[str, Any] = {"revision": folder.name} if re.fullmatch(r"[0-9a-f]{40}", folder.name) else {}
    single = "model.safetensors"
    folder = _snapshot(name, [single], **same)
    if not (folder / single).exists() and (names := _index_files(folder / INDEX)):
        folder = _snapshot(name, [glob.escape(name) for name in names], **same)
    return folder


def _index_files(index: Path) -> list[str]:
    """The weight files that an index names; none if it is no index, which `open_source` says."""
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []
    return sorted(name for name in names if isinstance(name, str) and Path(name).name == name)


def _check_gguf(path: Path) -> None:
    if not path.is_dir() or (path / "config.json").exists() or (path / "manifest.json").exists():
        return
    files = sorted(path.glob("*.gguf"))
    if files:
        raise UnsupportedFormatError(
            f"{path} is a directory of GGUF files; give the one that is to be read, such as {files[0]}"
        )


def _missing(name: str, path: Path, why: str) -> CheckpointError:
    near = nearest(path)
    advice = f"did you mean {near}?" if near is not None else "check the name"
    return CheckpointError(f"model {name!r} is not a directory here, and {why}; {advice}")


def nearest(path: Path) -> Path | None:
    """An existing directory whose name is nearest to that of a path that does not exist."""
    try:
        beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:
        return None
    found = difflib.get_close_matches(path.name, beside, 1)
    return path.parent / found[0] if found else None

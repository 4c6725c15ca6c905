"""Models by name: a directory here, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from scheduler.errors import CheckpointError, UnsupportedFormatError

MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")


def find_model(name: str, files: Sequence[str] = MODEL_FILES, download: bool = True) -> Path:
    """A path, which may not exist, or is a GGUF file; or the snapshot of a Hub repository (`org/name`), with those
    `files` (patterns) of it. Without `download`, only the local Hub cache is searched. HF_HOME and HF_HUB_OFFLINE
    apply.

    Raises CheckpointError, or UnsupportedFormatError for directories and repositories of GGUF files.
    """
    path = Path(os.path.expanduser(name))
    _check_gguf(path)
    if path.exists() or name.count("/") != 1 or path.suffix in (".json", ".gguf") or name.startswith((".", "/", "~")):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if name.lower().endswith("gguf"):
        raise UnsupportedFormatError(
            f"model {name!r} is, by its name, a repository of GGUF files; download one of them and give that, or the "
            "repository that they were made from"
        )
    try:
        return Path(snapshot_download(name, allow_patterns=list(files), local_files_only=not download))
    except HFValidationError as error:
        raise _missing(name, path, "no name of a Hub repository") from error
    except LocalEntryNotFoundError as error:
        raise _missing(name, path, "not in the local Hub cache, and the Hub cannot be reached") from error
    except HfHubHTTPError as error:
        raise _missing(name, path, "no Hub repository that can be read") from error
    except OSError as error:
        raise _missing(name, path, f"not to be had from the Hub ({error})") from error


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

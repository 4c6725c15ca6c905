"""The checkpoints on this machine: those that came with OD-MoE, the models folder and the Hub's cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoint.models_folder import models_dir
from odmoe.inventory.entry import CHECKPOINT, SHIPPED, Entry, size_of_folder
from odmoe.model_files import shipped_models
from scheduler.errors import StoreWriteError


def checkpoints_here() -> list[Entry]:
    """Every checkpoint with experts, and every GGUF file, the one used last first within each place."""
    shipped = [_of_folder(name, folder, SHIPPED) for name, folder in sorted(shipped_models().items())]
    folder = models_dir()
    own = [_of_folder(path.name, path, CHECKPOINT) for path in (folder.iterdir() if folder.is_dir() else ())]
    cached = [one for repository in _repositories() for one in _of_repository(repository)]
    found = [*own, *cached]
    return [*sorted(filter(None, found), key=lambda one: -one.last_used), *filter(None, shipped)]


def remove_checkpoint(entry: Entry) -> None:
    """Remove a checkpoint of the models folder or the Hub's cache. Raises StoreWriteError."""
    path = Path(entry.path)
    try:
        if path.parent == models_dir():
            if path.is_symlink() or path.is_file():
                path.unlink()
            else:
                (path / "config.json").unlink(missing_ok=True)  # what an interruption leaves is no model
                shutil.rmtree(path)
            return
        from huggingface_hub import scan_cache_dir

        found = scan_cache_dir()
        commits = [
            revision.commit_hash
            for repository in found.repos
            if repository.repo_path == path
            for revision in repository.revisions
        ]
        found.delete_revisions(*commits).execute()
        if path.exists() and path.name.startswith("models--"):  # what an interrupted download has left
            shutil.rmtree(path)
    except OSError as error:
        raise StoreWriteError(f"{path} cannot be removed: {error.strerror}; check its owner") from error


def _repositories() -> Iterator[Any]:
    from huggingface_hub import constants, scan_cache_dir

    if Path(constants.HF_HUB_CACHE).is_dir():
        yield from (one for one in scan_cache_dir().repos if one.repo_type == "model")


def _of_repository(repository: Any) -> Iterator[Entry]:
    """Of the revision that was changed last."""
    revisions = sorted(repository.revisions, key=lambda one: -one.last_modified)
    used = repository.last_accessed
    for revision in revisions[:1]:
        config = _read(revision.snapshot_path / "config.json")
        ggufs = sorted(file.file_name for file in revision.files if file.file_name.endswith(".gguf"))
        if _has_experts(config) or ggufs:
            format = _format(config) if not ggufs else ", ".join(map(_gguf_format, ggufs))
            yield Entry(
                repository.repo_id,
                CHECKPOINT,
                str(config.get("model_type", "")),
                format,
                "",
                repository.size_on_disk,
                used,
                str(repository.repo_path),
            )


def _of_folder(name: str, path: Path, kind: str) -> Entry | None:
    if path.suffix == ".gguf":
        return Entry(name, kind, "", _gguf_format(name), "", size_of_folder(path), _used(path), str(path))
    config = _read(path / "config.json")
    if not path.is_dir() or not config:
        return None
    family, used = str(config.get("model_type", "")), max(map(_used, path.iterdir()), default=0.0)
    return Entry(name, kind, family, _format(config), "", size_of_folder(path), used, str(path))


def _used(path: Path) -> float:
    """0 where it cannot be told, as of a dangling link."""
    try:
        found = path.stat()
    except OSError:
        return 0.0
    return max(found.st_atime, found.st_mtime)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _has_experts(config: dict[str, Any]) -> bool:
    inner = config.get("text_config")
    own = any("expert" in name and isinstance(value, int) for name, value in config.items())
    return own or (isinstance(inner, dict) and _has_experts(inner))


def _format(config: dict[str, Any]) -> str:
    """The published format, else the dtype."""
    inner = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    quantised = config.get("quantization_config") or {}
    dtype = config.get("dtype") or config.get("torch_dtype") or (inner or {}).get("dtype") or "unknown"
    return str(quantised.get("quant_method") or dtype) if isinstance(quantised, dict) else str(dtype)


def _gguf_format(name: str) -> str:
    from odmoe.pull.wanted_files import quantisation_of

    return f"GGUF {quantisation_of(name) or ''}".strip()

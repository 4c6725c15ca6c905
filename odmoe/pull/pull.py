"""A model from the Hub, or one that came with OD-MoE, onto this machine."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from checkpoint.models_folder import models_dir
from checkpoint.sharding.model_directory import INDEX
from odmoe.model_files import DEMO, shipped_models
from odmoe.pull.download import PARTIAL, download
from odmoe.pull.hub_errors import explained
from odmoe.pull.wanted_files import HubFile, gguf_files, small_files, weight_files
from scheduler.errors import CheckpointError, ConfigError, CorruptCheckpointError, StoreWriteError

_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Names of commits and of files in the Hub's cache: they become parts of paths."""
AT_ONCE = 4
"""Files that are fetched at the same time."""
Progress = Callable[[str, int, int], None]
"""Task, bytes done, bytes in all."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What was asked for, where it is now, and its bytes; `fetched_bytes` of them have come over the network."""

    name: str
    path: Path
    revision: str | None
    files: int
    bytes: int
    fetched_bytes: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """A repository of the Hub at one commit, and where its files go: to `folder`, or into the Hub's cache."""

    name: str
    revision: str | None
    commit: str
    files: tuple[HubFile, ...]
    folder: Path | None

    def place(self, file: HubFile) -> Path:
        """Of a file's bytes. The Hub's client keeps a file in its cache by the file's key."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        if self.folder is not None:
            return self.folder / file.name
        repository = repo_folder_name(repo_id=self.name, repo_type="model")
        return Path(constants.HF_HUB_CACHE) / repository / "blobs" / file.key


def copy_shipped(name: str, folder: Path | None, progress: Progress) -> Pulled:
    """Copy a model that came with OD-MoE (`demo`, or its own name) to `folder`, else to the models folder. Raises
    ConfigError, StoreWriteError."""
    own = DEMO if name == "demo" else name
    shipped = shipped_models()
    if own not in shipped:
        raise ConfigError(
            f"{name!r} did not come with this installation, which has {', '.join(shipped) or 'no models'}; give "
            "org/name of a repository on the Hub"
        )
    source, target = shipped[own], folder or models_dir() / own
    files = sorted((path for path in source.iterdir() if path.is_file()), key=lambda path: path.name == "config.json")
    total, done = sum(path.stat().st_size for path in files), 0
    try:
        check_room(target, total)
        target.mkdir(parents=True, exist_ok=True)
        for path in files:
            shutil.copyfile(path, target / (path.name + PARTIAL))
            (target / (path.name + PARTIAL)).replace(target / path.name)
            progress("pull", done := done + path.stat().st_size, total)
    except OSError as error:
        raise StoreWriteError(f"{target} cannot be written: {error.strerror}; give --to DIR") from error
    return Pulled(own, target, None, len(files), total, 0)


def list_wanted(name: str, revision: str | None, folder: Path | None) -> tuple[Wanted, str | None]:
    """The listing of `org/name` or `org/name:QUANTISATION`, and the quantisation. Raises ConfigError,
    CheckpointError."""
    from huggingface_hub import HfApi

    repository, _, quantisation = name.partition(":")
    if repository.count("/") != 1:
        raise ConfigError(f"{name!r} is no name of a Hub repository; give org/name, or demo")
    with explained(repository):
        info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=30)
    files = tuple(
        HubFile(
            one.rfilename,
            one.size or 0,
            one.lfs.sha256 if one.lfs else one.blob_id or "",
            one.lfs.sha256 if one.lfs else None,
        )
        for one in info.siblings or ()
    )
    for one in files:
        if not _DIGEST.fullmatch(one.key) or Path(one.name).is_absolute() or ".." in Path(one.name).parts:
            raise CheckpointError(f"the Hub lists {one.name!r} of {repository} without what is needed to fetch it")
    if not _DIGEST.fullmatch(info.sha or ""):
        raise CheckpointError(f"the Hub lists {info.sha!r} as the commit of {repository}, which is none")
    return Wanted(repository, revision, info.sha or "", files, folder), quantisation or None


def fetch(wanted: Wanted, quantisation: str | None, on_plan: Callable[[int, int], None], progress: Progress) -> Pulled:
    """Fetch what a model needs. `on_plan`: gets the number of files and their bytes, before the weights are fetched.
    Raises CheckpointError, ConfigError, StoreWriteError."""
    small = [] if quantisation else small_files(wanted.files)
    with explained(wanted.name):
        paths = _fetch_all(wanted, small, lambda *_: None)
        weights = (
            gguf_files(wanted.files, quantisation)
            if quantisation
            else weight_files(wanted.files, _indexed(paths.get(INDEX)))
        )
        chosen = [*small, *weights]
        size = sum(one.bytes for one in chosen)
        missing = sum(one.bytes - there(wanted.place(one)) for one in weights)
        on_plan(len(chosen), size)
        check_room(wanted.place(weights[0]).parent, missing)
        paths |= _fetch_all(wanted, weights, progress)
    first = paths[weights[0].name]
    path = first if quantisation else wanted.folder or first.parent
    return Pulled(wanted.name, path, wanted.commit, len(chosen), size, missing)


def check_room(folder: Path, needed: int) -> None:
    """Raises StoreWriteError naming the bytes that are needed and free."""
    at = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(at).free
    if needed > free:
        raise StoreWriteError(
            f"{folder} needs {needed / 1e9:.2f} GB more, and {free / 1e9:.2f} GB are free there; make room (odmoe "
            "models lists what can go), or give --to DIR on another disk"
        )


def there(place: Path) -> int:
    """Bytes of a file that have come, whole or in part."""
    part = place.with_name(place.name + PARTIAL)
    return next((one.stat().st_size for one in (place, part) if one.exists()), 0)


def _fetch_all(wanted: Wanted, files: Sequence[HubFile], progress: Progress) -> dict[str, Path]:
    """Name -> path of each file. The first error ends the others."""
    from huggingface_hub import hf_hub_url

    total, done, changing, stopped = sum(one.bytes for one in files), 0, threading.Lock(), threading.Event()

    at_place = {wanted.place(one): threading.Lock() for one in files}
    """Files of the same bytes have one place in the cache."""

    def step(count: int) -> None:
        nonlocal done
        if stopped.is_set():
            raise CheckpointError(f"fetching {wanted.name} was given up")
        with changing:
            done += count
            progress("pull", done, total)

    def one_file(file: HubFile) -> Path:
        url = hf_hub_url(wanted.name, file.name, revision=wanted.commit)
        with at_place[wanted.place(file)]:
            download(url, file, wanted.place(file), step)
        return wanted.place(file) if wanted.folder is not None else _linked(wanted, file)

    pool = ThreadPoolExecutor(AT_ONCE, "pull")
    try:
        running = {file.name: pool.submit(one_file, file) for file in files}
        return {name: one.result() for name, one in running.items()}
    finally:  # nobody waits for a connection that says nothing
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _linked(wanted: Wanted, file: HubFile) -> Path:
    """Have the Hub's client enter the bytes, which it finds in its cache, under the file's name."""
    from huggingface_hub import hf_hub_download

    path = Path(hf_hub_download(wanted.name, file.name, revision=wanted.revision))
    if wanted.commit not in path.parts or path.stat().st_size != file.bytes:
        raise CorruptCheckpointError(f"{wanted.name} has changed since {wanted.commit} was listed; run this again")
    return path


def _indexed(index: Path | None) -> list[str]:
    if index is None:
        return []
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{index} is no index of weights ({error}); the repository is damaged") from error
    return sorted(str(name) for name in names)

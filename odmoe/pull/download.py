"""One file from the Hub, resumed and checked.

The Hub's own client begins a file anew in each process; a file of many gigabytes has to go on where it stopped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from odmoe.pull.wanted_files import HubFile
from scheduler.errors import CorruptCheckpointError, StoreWriteError

PARTIAL = ".odmoe-partial"
TRIES = 5
"""Attempts in a row that bring nothing."""
PAUSE_S = 1.0
SILENCE_S = 60.0


def download(url: str, file: HubFile, target: Path, step: Callable[[int], None]) -> None:
    """Fetch `url` to `target`, unless that is there. `step` gets bytes: those that were there first, then as they come;
    negative if they have to come again.

    An interrupted download leaves a file beside the target, with which the next one goes on. Raises
    CorruptCheckpointError for wrong bytes, StoreWriteError, and httpx2's and the Hub's own errors.
    """
    try:
        if target.exists() and target.stat().st_size == file.bytes and _digest(target, file) == _listed(file):
            step(file.bytes)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + PARTIAL)
        with partial.open("ab") as held:
            _lock(held, partial)
            _fill(url, file, partial, step)
            found = _digest(partial, file)
            if found != _listed(file):
                partial.unlink()
                kind = "git's SHA-1" if file.digest is None else "SHA-256"
                raise CorruptCheckpointError(
                    f"{file.name} came with {kind} {found}, and the Hub lists {_listed(file)}; run this again to "
                    "fetch it anew"
                )
            os.replace(partial, target)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM):
            raise
        raise StoreWriteError(f"{target} cannot be written: {error.strerror}; make room, or give --to DIR") from error


def _lock(held: IO[bytes], partial: Path) -> None:
    """Raises StoreWriteError if another process writes the same file."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StoreWriteError(f"another process is fetching {partial}; wait for it, or end it") from error


def _fill(url: str, file: HubFile, partial: Path, step: Callable[[int], None]) -> None:
    """Append to `partial` until it is whole. Raises httpx2's and the Hub's own errors, CorruptCheckpointError."""
    import httpx2

    had = partial.stat().st_size
    if had > file.bytes:
        os.truncate(partial, 0)
        had = 0
    step(had)
    tries = 0
    while had < file.bytes:
        before = had
        try:
            had = _request(url, file, partial, had, step)
        except (httpx2.TransportError, httpx2.StreamError):
            had = partial.stat().st_size
            tries = 0 if had > before else tries + 1
            if tries >= TRIES:
                raise
            time.sleep(PAUSE_S)
            continue
        if had < file.bytes and had == before:
            raise CorruptCheckpointError(
                f"{file.name} ends after {had:,} bytes, and the Hub lists {file.bytes:,}; run this again later"
            )


def _request(url: str, file: HubFile, partial: Path, had: int, step: Callable[[int], None]) -> int:
    """Ask for what is missing. Returns the bytes that are there then."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if had:
        headers["Range"] = f"bytes={had}-"
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=SILENCE_S) as response:
        if response.status_code >= 400:
            response.read()
        hf_raise_for_status(response)
        if had and response.status_code != 206:  # the whole file comes
            step(-had)
            had = 0
        with partial.open("r+b" if had else "wb") as stream:
            stream.seek(had)
            for chunk in response.iter_bytes():
                if had + len(chunk) > file.bytes:
                    raise CorruptCheckpointError(
                        f"{file.name} has more than the {file.bytes:,} bytes that the Hub lists"
                    )
                stream.write(chunk)
                had += len(chunk)
                step(len(chunk))
    return had


def _listed(file: HubFile) -> str:
    """By the Hub: the key of a file outside of LFS is the id of its git blob."""
    return file.digest or file.key


def _digest(path: Path, file: HubFile) -> str:
    if file.digest is None:
        content = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    with path.open("rb") as stream:
        with contextlib.suppress(AttributeError, OSError):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return hashlib.file_digest(stream, "sha256").hexdigest()

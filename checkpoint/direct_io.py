"""Files read and written past the page cache (O_DIRECT), if the file system supports it.

Weights pass once: caching them costs more than the transfer, and evicts pages that are read again.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch

from checkpoint.tensors import PAGE, aligned_buffer, round_up

PIECE_BYTES = 1 << 24
_DIRECT = getattr(os, "O_DIRECT", 0)


def open_direct(file: Path, flags: int) -> int:
    """A descriptor past the page cache, or an ordinary one if the file system has no O_DIRECT. Raises OSError."""
    try:
        return os.open(file, flags | _DIRECT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL or not _DIRECT:
            raise
        return os.open(file, flags | os.O_CLOEXEC, 0o644)


def _through_cache(descriptor: int) -> bool:
    """Turn O_DIRECT off. False when it was off."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & _DIRECT:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
    return True


def room_for(start: int, nbytes: int) -> int:
    """Bytes of buffer that `read_at` needs: whole pages."""
    return round_up(start + nbytes) - start // PAGE * PAGE


def read_at(descriptor: int, start: int, nbytes: int, buffer: torch.Tensor) -> torch.Tensor:
    """`nbytes` of a file from `start`, as a view of `buffer` (uint8, page-aligned, at least `room_for` long).

    Returns fewer bytes if the file ends before. Raises OSError.
    """
    lead = start % PAGE
    wanted = buffer.numpy().data[: room_for(start, nbytes)]
    done = 0
    while done < lead + nbytes:
        try:
            count = os.preadv(descriptor, [wanted[done:]], start - lead + done)
        except OSError as error:
            if error.errno == errno.EINVAL and _through_cache(descriptor):
                continue
            raise
        done += count
        if not count:
            break
        if done % PAGE:  # the end of the file, or a short read
            _through_cache(descriptor)
    return buffer[lead : max(lead, min(done, lead + nbytes))]


def pieces(file: Path) -> Iterator[memoryview]:
    """A file from start to end in pieces of 16 MiB, each valid until the next one. Raises OSError."""
    descriptor, at = open_direct(file, os.O_RDONLY), 0
    try:
        buffer = aligned_buffer(min(PIECE_BYTES, round_up(os.fstat(descriptor).st_size)))
        while len(data := read_at(descriptor, at, len(buffer), buffer)):
            yield data.numpy().data
            at += len(data)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, start: int, data: torch.Tensor) -> None:
    """Write all of `data` (uint8) to a file. `data`, its length and `start` are page-aligned. Raises OSError."""
    rest = data.numpy().data
    while rest:
        try:
            count = os.pwrite(descriptor, rest, start)
        except OSError as error:
            if error.errno == errno.EINVAL and _through_cache(descriptor):
                continue
            raise
        rest, start = rest[count:], start + count


class Appender:
    """A file written from its start, in pieces of any length, synced when closed without an error."""

    def __init__(self, file: Path) -> None:
        self._descriptor = open_direct(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._buffer = aligned_buffer(PIECE_BYTES)
        self._filled = 0
        self._written = 0

    def __enter__(self) -> Appender:
        return self

    def append(self, data: torch.Tensor) -> None:
        """Bytes (uint8 [n]). Raises OSError."""
        while len(data):
            part = data[: PIECE_BYTES - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == PIECE_BYTES:
                self._flush()

    def _flush(self) -> None:
        write_at(self._descriptor, self._written, self._buffer[: round_up(self._filled)])
        self._written += self._filled
        self._filled = 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self._flush()
                os.ftruncate(self._descriptor, self._written)
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def write_synced(file: Path, content: str | bytes) -> None:
    """Write a file that survives a power cut once its directory is synced. Raises OSError."""
    with file.open("wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_directory(folder: Path) -> None:
    """Make creations and renames in a directory survive a power cut, as far as the file system supports it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)

"""Files that are there whole or not at all: on a disk that is full, and past a limit of their size."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.files import write_whole


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow past 4 KiB."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, most))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@pytest.mark.parametrize("before", [None, b"what was there"])
def test_a_full_disk(before: bytes | None, small_disk: Path) -> None:
    file = small_disk / "file"
    if before is not None:
        file.write_bytes(before)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_whole(file, bytes(1 << 20))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(file))
    assert [entry.read_bytes() for entry in small_disk.iterdir()] == ([] if before is None else [before])
    write_whole(file, b"room for this")
    assert file.read_bytes() == b"room for this"


@pytest.mark.usefixtures("small_files")
def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large") as caught:
        write_whole(tmp_path / "file", bytes(1 << 20))
    assert caught.value.filename == str(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file or directory") as caught:
        write_whole(tmp_path / "none" / "file", b"x")
    assert caught.value.filename == str(tmp_path / "none" / "file")

"""What this process reads from disks, and the files that it read before."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def disk_bytes() -> int:
    """What the kernel has fetched from disks for this process so far; pages that it had already do not count."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, value = line.split(": ")
        if name == "read_bytes":
            return int(value)
    raise RuntimeError("/proc/self/io has no read_bytes; is this Linux?")


def drop_pages(paths: Iterable[Path]) -> None:
    """Write these files, or all files in these folders, to the disk and drop their pages from the kernel's cache, so
    that the next reader reads the disk and pays for its own pages."""
    for path in paths:
        for file in [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file()):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

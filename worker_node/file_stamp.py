"""What of a file changes with every write."""

from __future__ import annotations

import os
from pathlib import Path

from wire import runtime

FileStamp = tuple[int, ...]


def file_stamp(path: Path) -> FileStamp:
    """Of a file that cannot be looked at: like no other."""
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0, runtime.monotonic_ns())
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

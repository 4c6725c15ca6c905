"""Which processes of this machine read files below a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def processes_using(folder: Path) -> list[tuple[int, str]]:
    """(process id, command) of each that has a file there open or mapped, this one apart. Those of other users are not
    seen, unless root asks."""
    root = str(folder.resolve())
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) != os.getpid() and any(_is_below(name, root) for name in _files(process)):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                found.append((int(process.name), b" ".join(words).decode(errors="replace").strip()))
    return found


def _files(process: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                yield os.readlink(link)
    with contextlib.suppress(OSError):
        for line in (process / "maps").read_text(errors="replace").splitlines():
            yield line.partition("/")[1] + line.partition("/")[2]


def _is_below(name: str, root: str) -> bool:
    return name == root or name.startswith(f"{root}/")

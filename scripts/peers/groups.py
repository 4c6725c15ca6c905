"""Memory caps: control groups of the kernel, versions 1 and 2.

All that a process of a group touches first counts against the group's limit, pages of mapped files included. A mapped
model that is larger than the limit is therefore read from the disk again and again.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

PREFIX = "odmoe-peers-"
"""Names of groups begin with it and the number of the process that made them."""
GONE_S = 10.0
"""Longest wait for the kernel to release a group whose processes have ended."""


@dataclass(frozen=True, slots=True)
class Files:
    """What a version calls its files."""

    limit: str
    swap: str
    """Limit that keeps memory out of the swap space. Absent where the kernel does not count swap."""
    peak: str
    usage: str


FILES = {
    1: Files(
        "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max_usage_in_bytes", "memory.usage_in_bytes"
    ),
    2: Files("memory.max", "memory.swap.max", "memory.peak", "memory.current"),
}


class Refused(Exception):
    """No group can be made here. The message says why."""


class Group:
    """A new group below `parent` with a limit in bytes. `close` removes it once its processes have ended.

    Raises Refused.
    """

    def __init__(self, parent: Path, version: int, name: str, limit: int) -> None:
        self.path = parent / name
        self.limit = limit
        self._files = FILES[version]
        try:
            self.path.mkdir()
        except OSError as error:
            raise Refused(f"{self.path} cannot be made: {error.strerror}") from error
        try:
            self._write(self._files.limit, limit)
            if (self.path / self._files.swap).exists():
                self._write(self._files.swap, 0 if version == 2 else limit)
        except OSError as error:
            self.close()
            raise Refused(f"{self.path}: the limit cannot be set: {error.strerror}") from error

    def _write(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))

    def add(self, pid: int) -> None:
        """Put a process into the group. What it touched before stays with its old group."""
        self._write("cgroup.procs", pid)

    def peak_bytes(self) -> int | None:
        """The most that the group held at once. None where the kernel does not say."""
        file = self.path / self._files.peak
        return int(file.read_text()) if file.is_file() else None

    def close(self) -> None:
        """Drop the group's page cache and remove it. Raises Refused if a process is left in it."""
        deadline = time.monotonic() + GONE_S
        with contextlib.suppress(OSError):  # version 1 only
            self._write("memory.force_empty", 0)
        while self.path.is_dir():
            try:
                self.path.rmdir()
            except OSError as error:
                if time.monotonic() > deadline:
                    raise Refused(f"{self.path} cannot be removed: {error.strerror}") from error
                time.sleep(0.05)


@dataclass(slots=True)
class Groups:
    """Where this process may make groups."""

    parent: Path
    version: int
    _count: int = 0

    def make(self, limit: int) -> Group:
        """Raises Refused."""
        self._count += 1
        return Group(self.parent, self.version, f"{PREFIX}{os.getpid()}-{self._count}", limit)

    def sweep(self) -> None:
        """Remove what killed runs left."""
        for path in self.parent.glob(f"{PREFIX}*"):
            if not Path("/proc", path.name.removeprefix(PREFIX).split("-")[0]).exists():
                with contextlib.suppress(OSError):
                    path.rmdir()


def find_groups(proc: Path = Path("/proc/self")) -> Groups:
    """The place below this process's own group. A group is made there and removed, to see that it is allowed.

    Raises Refused.
    """
    reasons = []
    for parent, version in _places(proc):
        found = Groups(parent, version)
        try:
            if version == 2:
                _delegate(parent)
            found.sweep()
            found.make(1 << 30).close()
            return found
        except (Refused, OSError) as error:
            reasons.append(str(error))
    raise Refused("; ".join(reasons) or "no memory controller is mounted")


def _places(proc: Path) -> list[tuple[Path, int]]:
    """Folders of this process's own group, each with its version."""
    mounts: dict[int, Path] = {}
    for line in (proc / "mounts").read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(","):
            mounts[1] = Path(folder)
        elif kind == "cgroup2":
            mounts[2] = Path(folder)
    found = []
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        version = 2 if not controllers else 1 if "memory" in controllers.split(",") else 0
        if version in mounts:
            own = mounts[version] / path.lstrip("/")
            found.append((own if own.is_dir() else mounts[version], version))
    return sorted(found, key=lambda one: one[1])


def _delegate(parent: Path) -> None:
    """Pass the memory controller on to child groups. A group with children must hold no process itself, so this
    process moves into a child of its own. Raises Refused where others share the group."""
    if "memory" not in (parent / "cgroup.controllers").read_text().split():
        raise Refused(f"{parent} has no memory controller")
    control = parent / "cgroup.subtree_control"
    if "memory" in control.read_text().split():
        return
    own = parent / f"{PREFIX}{os.getpid()}"
    own.mkdir(exist_ok=True)
    (own / "cgroup.procs").write_text(str(os.getpid()))
    try:
        control.write_text("+memory")
    except OSError as error:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        own.rmdir()
        raise Refused(
            f"{control} cannot be written ({error.strerror}); start the script in a scope of its own: "
            "systemd-run --user --scope -p Delegate=yes ..."
        ) from error

"""Memory of another process."""

from __future__ import annotations

import threading
from pathlib import Path

PERIOD_S = 0.005


def anonymous_bytes(pid: int) -> int:
    """Resident memory that is no page of a file. 0 where the process has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


class AnonymousPeak:
    """The most anonymous memory of a process, looked at every 5 ms: the kernel keeps no peak of it."""

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> AnonymousPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(PERIOD_S):
            self.bytes = max(self.bytes, anonymous_bytes(self._pid))

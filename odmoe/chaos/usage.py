"""What a process holds: memory, threads, descriptors. Read from Linux's /proc, by its number."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Usage:
    memory_bytes: int
    """Resident."""
    threads: int
    descriptors: int

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.memory_bytes + other.memory_bytes,
            self.threads + other.threads,
            self.descriptors + other.descriptors,
        )


def usage_of(pid: int) -> Usage | None:
    """None: it has ended, or is another user's."""
    try:
        fields = dict(re.findall(r"^(\w+):\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    return Usage(int(fields["VmRSS"]) << 10, int(fields["Threads"]), descriptors) if "VmRSS" in fields else None

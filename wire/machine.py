"""Host name, processor and memory of this machine, from the kernel."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path


def host_name() -> str:
    return socket.gethostname()


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model and the number of cores that this process may use. If the kernel gives no model, as on
    many ARM boards, the architecture stands for it."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    name = next(filter(None, named), platform.machine())
    cores = len(os.sched_getaffinity(0))
    return f"{name}, {cores} {'core' if cores == 1 else 'cores'}"


def memory_bytes() -> int:
    """All memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

"""How much of a process's busy time some functions take, by py-spy's samples of all its threads."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

RATE = 100
"""Samples a second."""
RESTORING = re.compile(r"restore|/native/")
"""A frame of the restoring of an expert's bytes."""
LIMIT_S = 600


def share_of(pid: int, work: Callable[[], object], frames: re.Pattern[str]) -> float | None:
    """Of the samples that are taken while `work` runs, the share with such a frame. Idle threads do not count.

    None where py-spy is not installed, may not look at the process, or has no sample."""
    found = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if found is None:
        work()
        return None
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "samples"
        command = [found, "record", "--pid", str(pid), "--rate", str(RATE), "--duration", str(LIMIT_S)]
        command += ["--format", "raw", "--full-filenames", "--output", str(output)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as spy:
            work()
            spy.send_signal(2)  # as Ctrl-C, with which it writes what it has
            spy.wait(60)
        return share(output.read_text(), frames) if output.is_file() else None


def share(stacks: str, frames: re.Pattern[str]) -> float | None:
    """`stacks`: a line each, frames from the outermost on, joined by `;`, then a space and the count."""
    all_of = some = 0
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        all_of += int(count)
        some += int(count) if frames.search(stack) else 0
    return some / all_of if all_of else None

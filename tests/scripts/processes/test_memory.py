"""Anonymous memory of a process, against memory of known size that it takes."""

from __future__ import annotations

import subprocess
import sys

from scripts.processes.memory import AnonymousPeak, anonymous_bytes

TAKES = """
import time
held = bytearray(200_000_000)
time.sleep(0.3)
del held
print("freed", flush=True)
input()
"""


def test_the_peak_stays_when_memory_is_freed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with AnonymousPeak(process.pid) as peak:
            assert process.stdout.readline() == "freed\n"
        assert 200e6 < peak.bytes < 230e6
        assert anonymous_bytes(process.pid) < 50e6
        process.stdin.write("\n")
        process.stdin.close()
    assert anonymous_bytes(process.pid) == 0

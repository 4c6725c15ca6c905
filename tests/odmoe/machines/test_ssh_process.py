"""A command's pipes after its end."""

from __future__ import annotations

import subprocess
from typing import Any

from odmoe.machines.ssh_process import Remote


def test_what_is_sent_after_the_end_is_dropped() -> None:
    """Another thread may still send while `close` waits."""
    nothing: Any = None
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        remote = Remote(process, nothing, lambda ended: None)
        remote.send("before\n")
        remote.close()
        remote.send("after\n")
        assert remote.stdout.read() == b"before\n"

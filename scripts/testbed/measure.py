"""Bits a second and round trips between two hosts of the testbed, as `odmoe doctor` measures them."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from typing import Any

from odmoe.doctor.examination import LINK_S, ON_HOST
from odmoe.machines.cluster_file import Host
from scripts.testbed.layout import Layout, TestbedError
from scripts.testbed.namespaces import enter

PORT = 6400
"""One of those of Ray's processes."""


def measure_link(layout: Layout, source: Host, target: Host, pids: list[int]) -> dict[str, float]:
    """`to` and `from` the target in bits a second, and `trip_s`. `pids`: a process of each. Raises TestbedError."""
    if source == target:
        raise TestbedError(f"{source.name} has no link to itself; name two hosts")
    asked = json.dumps({"address": target.address, "port": PORT, "token": secrets.token_hex(16)})

    def program(pid: int, action: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-I", "-S", "-c", ON_HOST.read_text(), action, asked]
        return subprocess.Popen(enter(pid, layout.cluster.user, command), stdout=subprocess.PIPE, text=True)

    with program(pids[1], "sink") as answering, program(pids[0], "link") as asking:
        try:
            found: dict[str, Any] = json.loads(asking.communicate(timeout=LINK_S)[0] or '{"blocked": "no answer"}')
            far = json.loads(answering.communicate(timeout=LINK_S)[0] or "{}") if "blocked" in found else {}
        except subprocess.TimeoutExpired:
            raise TestbedError(f"{source.name} and {target.name}: no end within {LINK_S:.0f} s") from None
        finally:
            asking.kill()
            answering.kill()
    if "blocked" in found:
        causes = [f"{target.name}: {far['fault']}"] if "fault" in far else []
        causes.append(f"{source.name}: {found['blocked']}")
        raise TestbedError(f"no connection from {source.name} to {target.name}: {'; '.join(causes)}")
    return found

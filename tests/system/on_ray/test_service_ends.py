"""`odmoe serve` on nodes that it has started itself: it ends with its main node, so that a supervisor may act."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import httpx2
import pytest

from support.machines.processes import starter, wait_until_gone
from support.machines.served_process import SERVED_SMALL, address_of, client_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

END_S = 60.0
"""With a machine that is busy, and the end of Ray."""


def parents() -> dict[int, int]:
    """Of every process, by id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def main_node_below(above: int) -> int:
    """The process id of the main node's actor, whose Ray was started by process `above`."""
    of = parents()
    for pid in of:
        line, one = Path(f"/proc/{pid}/cmdline").read_bytes(), pid
        while one in of and one != above:
            one = of[one]
        if one == above and line.startswith(b"ray::Main"):
            return pid
    raise AssertionError(f"there is no main node below {above}")


def test_the_service_ends_with_its_main_node(demo: Path) -> None:
    with starter() as start:
        running = start("serve", "--cluster", "local", "-m", str(demo), *SERVED_SMALL, "--workers", "1")
        url = address_of(running)
        assert client_of(url).completions.create(model="demo-moe", prompt="Natalia", max_tokens=2).choices
        began = time.monotonic()
        os.kill(main_node_below(running.process.pid), signal.SIGKILL)
        assert httpx2.get(url.replace("/v1", "/ready"), timeout=END_S).status_code == 503
        code, _, err = running.finish()
        assert code == 1, err.decode()
        assert time.monotonic() - began < END_S
        assert b"odmoe: ClusterError: the cluster has ended" in err
        assert b"Traceback" not in err
        wait_until_gone(running.mark)

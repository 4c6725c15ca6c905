"""A host's link to the main node, or its store, is spoilt for a while: `python -m odmoe.chaos.spoil link HOST SECONDS`.

A process of its own ends it, whatever becomes of the one that began it: a host without its link cannot be told.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

LINK, STORE = "link", "store"
SOON_S = 1.0
"""Until it begins: time for whoever asked to hear that it will."""
START_S, TOOL_S = 60.0, 10.0


def may_cut() -> bool:
    """Whether this process may change its host's routes."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


def spoil(what: str, target: str, seconds: float) -> None:
    """Returns at once."""
    command = [sys.executable, "-m", "odmoe.chaos.spoil", what, target, f"{seconds:g}"]
    subprocess.run(command, check=True, timeout=START_S, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def route(verb: str, address: str) -> None:
    """`add`: nothing is sent to the address any more, as if a cable was pulled. `delete`: it is again."""
    subprocess.run(["ip", "route", verb, "blackhole", f"{address}/32"], check=True, timeout=TOOL_S)


def flip(store: str | Path) -> None:
    """Change the first byte of each expert of a store, or change it back. The manifest is read as it is: to import what
    reads it takes seconds."""
    for layer in json.loads(Path(store, "manifest.json").read_text())["layers"].values():
        with Path(store, layer["file"]).open("r+b") as file:
            for blob in layer["blobs"]:
                file.seek(blob["offset"])
                [byte] = file.read(1)
                file.seek(blob["offset"])
                file.write(bytes([byte ^ 16]))


def main(what: str, target: str, seconds: str) -> None:
    if os.fork():
        return
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    begin, end = (partial(route, "add"), partial(route, "delete")) if what == LINK else (flip, flip)
    time.sleep(SOON_S)
    begin(target)
    time.sleep(float(seconds))
    end(target)


if __name__ == "__main__":
    main(*sys.argv[1:])

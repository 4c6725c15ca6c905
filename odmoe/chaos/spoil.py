"""A host's link to the main node, its store or processes are spoilt for a while: `python -m odmoe.chaos.spoil link
SECONDS HOST`.

A process of its own ends it, whatever becomes of the one that began it: a host without its link cannot be told.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

LINK, STORE, FROZEN, SLOW = "link", "store", "frozen", "slow"
SOON_S = 1.0
"""Until it begins: time for whoever asked to hear that it will."""
START_S, TOOL_S = 20.0, 10.0
"""A start takes less than whoever asks for it waits, `CONTROL_S` of `odmoe.on_ray.calls`."""
RUNS_S, STANDS_S = 0.02, 0.08
"""A slowed process runs a fifth of the time, in turns of these lengths."""
NOBODY = "192.0.2.1"
"""Of RFC 5737: no host has this address."""


def may_cut() -> bool:
    """Whether this process may change its host's routes: root of a container often may not."""
    try:
        with cut(NOBODY):
            return True
    except (OSError, subprocess.SubprocessError):
        return False


def spoil(what: str, seconds: float, targets: Sequence[str]) -> Sequence[str]:
    """`targets`: addresses, stores' paths, process ids; at the same time. Returns them at once."""
    command = [sys.executable, "-m", "odmoe.chaos.spoil", what, f"{seconds:g}", *targets]
    subprocess.run(command, check=True, timeout=START_S, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return targets


@contextmanager
def cut(address: str) -> Iterator[None]:
    """Within the `with` block nothing is sent to the address, as if a cable was pulled."""
    try:
        _route("replace", address)
        yield
    finally:
        _route("delete", address)


def _route(verb: str, address: str) -> None:
    command = ["ip", "route", verb, "blackhole", f"{address}/32"]
    subprocess.run(command, check=True, capture_output=True, timeout=TOOL_S)


@contextmanager
def frozen(process: str) -> Iterator[None]:
    """Within the `with` block a process, by its id, stands still."""
    pid = int(process)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def damaged(store: str | Path) -> Iterator[None]:
    """Within the `with` block the first byte of each expert whose bytes are here is another."""
    with ExitStack() as at_end:
        for file, offset in _first_bytes(Path(store)):
            _flip(file, offset)
            at_end.callback(_flip, file, offset)
        yield


def _first_bytes(store: Path) -> Iterator[tuple[Path, int]]:
    """Files and offsets. Manifest and `held.json` are read as they are: to import what reads them takes seconds."""
    part = store / "held.json"
    held = json.loads(part.read_text())["experts"] if part.exists() else None
    for number, layer in json.loads((store / "manifest.json").read_text())["layers"].items():
        for expert, blob in enumerate(layer["blobs"]):
            if held is None or any(first <= expert <= last for first, last in held.get(number, ())):
                yield store / layer["file"], blob["offset"]


def _flip(path: Path, offset: int) -> None:
    """Change a byte, or change it back."""
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        [byte] = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 16]))


def during(what: str, target: str, seconds: float) -> None:
    """Spoil, and wait until it is over. A process may end meanwhile."""
    if what == SLOW:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            during(FROZEN, target, STANDS_S)
            time.sleep(RUNS_S)
        return
    with suppress(ProcessLookupError), {LINK: cut, STORE: damaged, FROZEN: frozen}[what](target):
        time.sleep(seconds)


def main(what: str, seconds: str, *targets: str) -> None:
    """A process for each target."""
    begin = time.monotonic() + SOON_S
    for target in targets:
        if os.fork():
            continue
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(max(0.0, begin - time.monotonic()))
        during(what, target, float(seconds))
        return


if __name__ == "__main__":
    main(*sys.argv[1:])

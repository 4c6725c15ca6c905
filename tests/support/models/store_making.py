"""Stores that are made whole, and in part: interrupted here, or killed in a process of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from checkpoint.sharding.partial_store import Partial, Progress, partial_of
from checkpoint.sharding.shard import make_store
from checkpoint.sharding.source import Source
from checkpoint.store import ExpertStore
from scheduler.errors import StoreError, StoreNotFoundError
from support.paths import ROOT

WAIT_S = 60.0
CHILD = """
import os, sys
from pathlib import Path
import torch, transformers.conversion_mapping, transformers.core_model_loading
from transformers import MixtralForCausalLM
from checkpoint.sharding.shard import make_store
from checkpoint.sharding.source import open_source
torch.set_num_threads(1)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            made = make_store(open_source(Path(sys.argv[1])), Path(line.strip()))
            os.write(1, f"done {made.resumed} {made.written}\\n".encode())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            os.write(1, f"{type(error).__name__} {error}\\n".encode())
        finally:
            os._exit(0)
    os.write(1, f"{child}\\n".encode())
    if os.waitpid(child, 0)[1]:
        os.write(1, b"killed\\n")
"""


def shard(
    source: Source,
    target: Path,
    dtype: str | None = None,
    progress: Progress | None = None,
    experts: str | None = None,
    dense: str | None = None,
) -> ExpertStore:
    return make_store(source, target, dtype, progress, experts=experts, dense=dense).store


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def check_refused(store: ExpertStore, kind: type[StoreError], *words: str) -> None:
    """It is not opened, and the error of that kind has these words."""
    with pytest.raises(kind) as caught:
        ExpertStore.open(store.path)
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value)


def wait_until(ready: Callable[[], object]) -> None:
    """Looked at often: what is waited for is over in milliseconds."""
    end = time.monotonic() + WAIT_S
    while not ready():
        assert time.monotonic() < end, f"not within {WAIT_S:g} s"
        time.sleep(0.0005)


def stop_after(source: Source, target: Path, layers: int, dtype: str | None = None, experts: str | None = None) -> None:
    """A run that is interrupted when `layers` layers are finished."""
    add = Partial.add_layer

    def stopping(self: Partial, layer: int, spec: Any) -> None:
        add(self, layer, spec)
        if len(self.layers) == layers:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Partial, "add_layer", stopping)
        with pytest.raises(KeyboardInterrupt):
            shard(source, target, dtype, experts=experts)


class StoreMaker:
    """A process that makes stores, each in a child of its own, which may be killed."""

    def __init__(self, model: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(model)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def line(self) -> str:
        """What it says next: a process id, "done ...", "killed", or an error's name and text."""
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def start(self, target: Path) -> int:
        """The child's process id."""
        assert self.process.stdin
        self.process.stdin.write(f"{target}\n")
        self.process.stdin.flush()
        return int(self.line())


def journaled(target: Path) -> int:
    """Finished layers, as a stranger sees them."""
    journal = partial_of(target) / "journal"
    try:
        return journal.read_text().count('"layer"')
    except FileNotFoundError:
        return 0


def kill_when(maker: StoreMaker, target: Path, due: Callable[[], bool]) -> str:
    """Start, kill -9 as soon as `due`, and say what became of it."""
    child = maker.start(target)
    wait_until(lambda: due() or not Path(f"/proc/{child}").exists())
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    return maker.line()


def assert_no_store(target: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        ExpertStore.open(target)


def check_killed_after(maker: StoreMaker, target: Path, whole: dict[str, bytes], layers: int) -> None:
    """Killed when so many layers are finished, and taken up again: in the end the same bytes, and nothing beside."""

    def due() -> bool:
        folder = partial_of(target) / "store"
        return journaled(target) >= layers and folder.exists() and len(list(folder.iterdir())) > layers

    assert kill_when(maker, target, due) == "killed"
    assert_no_store(target)
    finished = journaled(target)
    assert finished >= layers
    maker.start(target)
    assert maker.line() == f"done {finished} True"
    assert contents(target) == whole
    assert os.listdir(target.parent) == ["store"]

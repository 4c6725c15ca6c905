"""Hosts of a simulated world: real workers and shadows in processes that may die, on disks that may fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from checkpoint.expert import ExpertArithmetic
from checkpoint.store import ExpertStore
from shadow_node.model import ShadowModel
from shadow_node.node import Shadow
from shadow_node.pace import RealPace
from support.simulated.baton import Baton, Process
from support.simulated.links import Address
from wire import messages as w
from wire.base import Channel, Node, Role
from worker_node.form_choice import FormChoice
from worker_node.loaders.make import make_loader
from worker_node.node import Worker

SEEK_S, BYTES_PER_S = 0.0005, 200e6
CALL_S, LAYER_S = 0.0004, 0.0003
FOREVER_S = 1e9
SECTOR_BYTES = 512


@dataclass
class Parts:
    """What is wrong with a host; each a number of times, or for as long as it is set."""

    disk: str = ""
    """`error`, `short`, `slow`, `damaged`: what reads are."""
    reads_s: float = 0.0
    """A slow read takes so much longer."""
    computing: str = ""
    """`error`, `die`, `never`, `slow`, `nan`, `huge`: what computations do."""
    deadly: frozenset[tuple[int, int]] = frozenset()
    """(layer, expert) at whose computation the process dies."""
    answers: str = ""
    """`lost`, `twice`, `late`, `stale`, `huge`: what happens to answers."""
    left: int = 0
    """Answers, reads or computations that this still happens to."""

    def strikes(self, what: str) -> bool:
        if what and self.left > 0:
            self.left -= 1
            return True
        return False


class Disks:
    """In the place of `os` in the loader: reads of the calling process's disk."""

    def __init__(self, baton: Baton, parts_of: Callable[[], Parts | None]) -> None:
        self._baton, self._parts_of = baton, parts_of
        self._opened: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int) -> int:
        self._opened.add(file := os.open(path, flags))
        return file

    def close(self, file: int) -> None:
        self._opened.discard(file)
        os.close(file)

    def close_all(self) -> None:
        """As the end of a process does."""
        while self._opened:
            os.close(self._opened.pop())

    def preadv(self, file: int, buffers: Sequence[Any], offset: int) -> int:
        parts = self._parts_of() or Parts()
        self._baton.sleep(SEEK_S + len(buffers[0]) / BYTES_PER_S)
        fault = parts.disk if parts.strikes(parts.disk) else ""
        if fault == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if fault == "slow":
            self._baton.sleep(parts.reads_s)
        if fault == "short" and len(buffers[0]) > 4096:
            return os.preadv(file, [buffers[0][: len(buffers[0]) // 2 & ~4095]], offset)
        got = os.preadv(file, buffers, offset)
        if fault == "damaged":
            self._damage(buffers[0], min(got, 4096))
        return got

    def _damage(self, read: Any, size: int) -> None:
        """The exponent of some number, which is enormous then, or the signs of a sector."""
        random = self._baton.random
        if random.random() < 0.5:
            read[random.randrange(size) | 3] ^= 64
            return
        start = random.randrange(size // SECTOR_BYTES) * SECTOR_BYTES
        for at in range(start + 3, start + SECTOR_BYTES, 4):
            read[at] ^= 128


class Answers:
    """A node's end of its stream, on which answers go astray."""

    def __init__(self, baton: Baton, parts: Parts, channel: Channel, process: Process) -> None:
        self._baton, self._parts, self._channel, self._process = baton, parts, channel, process
        self._before: list[w.Message] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def send(self, *messages: w.Message) -> None:
        parts = self._parts
        out: list[w.Message] = []
        for message in messages:
            if not isinstance(message, w.Computed | w.Loaded | w.Prediction) or not parts.strikes(parts.answers):
                out.append(message)
                continue
            out += self._changed(message, parts.answers)
            self._before.append(message)
        if out:
            self._channel.send(*out)

    def _changed(self, message: w.Message, fault: str) -> list[w.Message]:
        if fault == "lost":
            return []
        if fault == "late":
            self._baton.spawn("late", self._process, lambda: self._later(message))
            return []
        if fault == "twice":
            return [message, message]
        if fault == "stale":
            return [*self._before[-1:], message]
        if isinstance(message, w.Loaded):
            return [replace(message, load_id=message.load_id + (1 << 40)), message]
        if isinstance(message, w.Computed):
            return [replace(message, call_id=(1 << 62) - 1), message]
        return [message]

    def _later(self, message: w.Message) -> None:
        self._baton.sleep(self._baton.random.uniform(0.01, 2.0))
        try:
            self._channel.send(message)
        except Exception:  # noqa: BLE001 - the stream is gone meanwhile
            return


class FaultyWorker(Worker):
    """A worker whose computations take time and may fail."""

    host: Host

    def compute_together(self, messages: Sequence[w.Compute], form: str = "") -> Sequence[torch.Tensor]:
        """As `Worker.compute_together`."""
        host, baton = self.host, self.host.baton
        parts = host.parts
        baton.sleep(CALL_S * baton.random.uniform(0.5, 2.0))
        if any((one.layer, one.expert) in parts.deadly for one in messages):
            host.kill()
        fault = parts.computing if parts.strikes(parts.computing) else ""
        if fault == "die":
            host.kill()
        if fault == "never":
            baton.sleep(FOREVER_S)
        if fault == "slow":
            baton.sleep(0.5)
        if fault == "error":
            raise MemoryError("no memory for a computation")
        outputs = super().compute_together(messages, form)
        wrong = {"nan": float("nan"), "huge": 3e38}.get(fault)
        return outputs if wrong is None else [torch.full_like(one, wrong) for one in outputs]


class ShadowTime(RealPace):
    """Its layers take time."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton

    def layer(self, rows: int, undisturbed_until: float) -> None:
        self._baton.sleep(LAYER_S)


@dataclass
class Made:
    """What all worlds of a process share: it is read, not changed."""

    store: ExpertStore
    arithmetic: ExpertArithmetic
    shadow_model: ShadowModel | None = None


@dataclass
class Host:
    """One node's machine."""

    baton: Baton
    role: Role
    number: int
    slots: int
    made: Made
    checks: str
    """`check_loads`."""
    parts: Parts = field(default_factory=Parts)
    starts: int = 0

    def __post_init__(self) -> None:
        self.address = Address(self.role)
        self.stopped = False
        """It is not to be started again."""

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"

    def start(self) -> None:
        """A new process, in which the node is made. Returns at once."""
        self.starts += 1
        process = Process(f"{self.name} #{self.starts}")
        process.parts = self.parts  # type: ignore[attr-defined]
        self.address.process, self.address.node = process, None
        self.address.tamper = lambda channel: Answers(self.baton, self.parts, channel, process)
        self.baton.spawn(f"{self.name} main", process, lambda: self._run(process))

    def _run(self, process: Process) -> None:
        self.baton.sleep(0.02)
        self.address.node = self._make()

    def _make(self) -> Node:
        made = self.made
        if self.role == "shadow":
            assert made.shadow_model is not None
            manifest = made.store.manifest
            return Shadow("shadow", made.shadow_model, manifest.model_digest, manifest.dtype, ShadowTime(self.baton))
        choice = FormChoice(("",), self.slots)
        loader = make_loader("disk", made.store)
        worker = FaultyWorker(self.name, made.store, made.arithmetic, loader, choice, checks=self.checks)
        worker.host = self
        return worker

    def kill(self) -> None:
        """Its process is gone, at once. It returns unless it is called from that process."""
        process = self.address.process
        if process is not None:
            self.address.process = self.address.node = None
            self.baton.kill(process)

"""Loads and computations that wait at a gate until the test opens it; or that are counted."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

from checkpoint.expert import ExpertArithmetic
from checkpoint.store import ExpertStore
from worker_node.loaders.base import HostLoader
from worker_node.loaders.digest import BlobDigest
from worker_node.loaders.memory import MemoryLoader

WAIT_S = 30.0


class Gate:
    """Where a thread arrives, is seen, and waits until it may go on."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.opened = threading.Event()

    def open(self) -> None:
        self.opened.set()

    def wait_for_arrival(self) -> None:
        assert self.arrived.wait(WAIT_S)

    def pass_through(self) -> None:
        self.arrived.set()
        assert self.opened.wait(WAIT_S)


class HeldLoader(HostLoader):
    """Loads from memory; at the gate of an expert it waits until that opens, or until the load is given up.

    Gates, errors and `begun` are for the loads of a worker that serves, not for those that measure it before.
    """

    name = "held"

    def __init__(self, store: ExpertStore) -> None:
        super().__init__(store)
        self.inner = MemoryLoader(store)
        self.gates: dict[tuple[int, int], Gate] = {}
        self.errors: dict[tuple[int, int], Exception] = {}
        self.begun: list[tuple[int, int]] = []
        self.serving = False

    def hold(self, layer: int, expert: int) -> Gate:
        return self.gates.setdefault((layer, expert), Gate())

    def load(
        self,
        layer: int,
        expert: int,
        into: torch.Tensor,
        cancelled: Callable[[], bool],
        form: str = "",
        digest: BlobDigest | None = None,
    ) -> int:
        if not self.serving:
            return self.inner.load(layer, expert, into, cancelled, form, digest)
        self.begun.append((layer, expert))
        if error := self.errors.pop((layer, expert), None):
            raise error
        if gate := self.gates.get((layer, expert)):
            gate.arrived.set()
            for _ in range(int(WAIT_S / 0.005)):
                if gate.opened.wait(0.005) or cancelled():
                    break
            else:
                raise AssertionError("held for too long")
        return self.inner.load(layer, expert, into, cancelled, form, digest)

    def reopen(self) -> None:
        self.inner.reopen()

    def close(self) -> None:
        self.inner.close()


class HeldArithmetic:
    """The real arithmetic behind a gate a layer, for the computations of a worker that serves."""

    def __init__(self, inner: ExpertArithmetic) -> None:
        self.inner = inner
        self.kernel = inner.kernel
        self.gates: dict[int, Gate] = {}
        self.serving = True

    def hold(self, layer: int) -> Gate:
        return self.gates.setdefault(layer, Gate())

    def is_rowwise(self, layer: int, views: dict[str, torch.Tensor]) -> bool:
        return self.inner.is_rowwise(layer, views)

    def bind(self, layer: int, views: dict[str, torch.Tensor]) -> Callable[..., torch.Tensor]:
        compute = self.inner.bind(layer, views)

        def held(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            if self.serving and (gate := self.gates.get(layer)):
                gate.pass_through()
            return compute(hidden, weights)

        return held


class CountedArithmetic:
    """The real arithmetic; `bound`: which layer was bound to which bytes, in order, and what is alive of that."""

    def __init__(self, inner: ExpertArithmetic) -> None:
        self._inner = inner
        self.kernel = inner.kernel
        self.bound: list[tuple[int, int]] = []
        self.alive: weakref.WeakSet[Callable[..., torch.Tensor]] = weakref.WeakSet()

    def bind(self, layer: int, views: dict[str, torch.Tensor]) -> Callable[..., torch.Tensor]:
        """As `ExpertArithmetic.bind`; bytes are known by the address of the first view."""
        compute = self._inner.bind(layer, views)
        self.bound.append((layer, next(iter(views.values())).data_ptr()))
        self.alive.add(compute)
        return compute

"""The main node's own computation of an expert, which decides between workers that differ."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from checkpoint.direct_io import open_direct, read_at
from checkpoint.encoded_experts import EncodedExperts, few_or_many
from checkpoint.expert import Compute, ExpertArithmetic
from checkpoint.joint_rows import by_pass
from checkpoint.kernels import EXACT, Linear
from checkpoint.manifest import checksum
from checkpoint.native.parameters import ExpertParameters
from checkpoint.store import ExpertStore
from checkpoint.tensors import aligned_buffer
from scheduler.errors import CorruptStoreError
from scheduler.types import ExpertId
from wire import runtime
from wire.machine import processor_name

MOST_WAITING = 4
"""Computations that may wait for the one under way."""


class Arbiter:
    """Computes experts from the main node's store, on the CPU, one at a time in a thread of its own.

    It reads an expert's bytes anew each time, and compares them with the manifest's checksum. While it computes, it
    holds the memory of one expert. `linear`: multiplies as in the workers.
    """

    arithmetic = ("cpu", processor_name())
    """What computes: the kind of device and its name."""

    def __init__(self, store: ExpertStore, linear: Linear = EXACT) -> None:
        self._store = store
        self._linear = linear
        self._experts: ExpertArithmetic | None = None
        self._encoded: EncodedExperts | None = None
        self._thread = runtime.ThreadPoolExecutor(1, "odmoe-arbiter")
        self._waiting = 0
        self._lock = runtime.Lock()

    def submit(self, job: Callable[[], object]) -> bool:
        """Run a job on the arbiter's thread. It must not raise. False where too many wait, or it was closed."""
        with self._lock:
            if self._waiting > MOST_WAITING:
                return False
            try:
                self._thread.submit(self._run, job)
            except RuntimeError:  # closed
                return False
            self._waiting += 1
            return True

    def _run(self, job: Callable[[], object]) -> None:
        try:
            job()
        finally:
            with self._lock:
                self._waiting -= 1

    def compute(
        self, expert: ExpertId, hidden: torch.Tensor, weights: torch.Tensor, passes: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """`hidden` [n, H] and routing weights [n] through an expert: [n, H]. `passes`: see
        `by_pass`. On the arbiter's thread.

        Raises CorruptStoreError, OSError; RuntimeError or MemoryError where memory does not suffice.
        """
        if self._experts is None:
            manifest = self._store.manifest
            self._experts = ExpertArithmetic(manifest.config, manifest.dtype, self._linear)
        file, blob = self._store.locate(*expert)
        buffer = aligned_buffer(blob.length)
        descriptor = open_direct(file, os.O_RDONLY)
        try:
            data = read_at(descriptor, blob.offset, blob.length, buffer)
        finally:
            os.close(descriptor)
        if len(data) != blob.length or checksum(data.numpy().data) != blob.checksum:
            raise CorruptStoreError(f"expert {expert.expert} of layer {expert.layer} in {file} fails its checksum")
        return by_pass(self._bound(self._experts, buffer, expert.layer), hidden, weights, passes)

    def _bound(self, arithmetic: ExpertArithmetic, buffer: torch.Tensor, layer: int) -> Compute:
        """As workers bind it."""

        def restored() -> Compute:
            parameters = ExpertParameters(self._store.manifest, threads=torch.get_num_threads()).of(buffer, layer)
            return arithmetic.bind(layer, parameters)

        if self._encoded is None:
            self._encoded = EncodedExperts(self._store.manifest, arithmetic)
        if self._encoded.computes(layer):
            return few_or_many(self._encoded.bind(buffer, layer), restored)
        return restored()

    def close(self) -> None:
        """Start nothing more. The job under way goes on to its end."""
        self._thread.shutdown(wait=False, cancel_futures=True)

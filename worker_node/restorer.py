"""Restores experts that were loaded in a smaller form, before they are computed."""

from __future__ import annotations

import threading

import torch

from checkpoint.expert import ExpertArithmetic
from checkpoint.forms import Scratch, restore_into
from checkpoint.store import ExpertStore
from checkpoint.tensors import aligned_buffer
from scheduler.errors import LaunchError
from worker_node.module_cache import Module


def restoring_bytes(store: ExpertStore, forms: tuple[str, ...], device: str = "cpu") -> int:
    """Device memory that a worker needs beside its slots to compute experts in these forms.

    Raises StoreError where the store lacks one of them.
    """
    groups = [store.manifest.form(form).group for form in forms if form]
    if not groups:
        return 0
    return store.manifest.blob_bytes + 5 * Scratch.weights_for([*store.manifest.layers.values()], max(groups), device)


class Restorer:
    """Device memory for one full expert, and scratch memory for restoring it. Used by one computation at a time.

    Raises StoreError where the store lacks one of `forms`, LaunchError where the device has no room.
    """

    def __init__(self, store: ExpertStore, arithmetic: ExpertArithmetic, forms: tuple[str, ...], device: str) -> None:
        self._store, self._arithmetic = store, arithmetic
        layers = list(store.manifest.layers.values())
        groups = [store.manifest.form(form).group for form in forms]
        nbytes = store.manifest.blob_bytes
        try:
            self._full = (
                aligned_buffer(nbytes) if device == "cpu" else torch.empty(nbytes, dtype=torch.uint8, device=device)
            )
            self._scratch = Scratch.of(layers, max(groups), device)
        except torch.OutOfMemoryError as error:
            raise LaunchError(
                f"{device} has no room for {nbytes} bytes to restore an expert in; take fewer slots ({error})"
            ) from error
        self._views: dict[int, dict[str, torch.Tensor]] = {}
        self._modules: dict[int, Module] = {}
        self._rowwise: dict[tuple[int, int], bool] = {}
        self._lock = threading.Lock()

    @property
    def allocated_bytes(self) -> int:
        return self._full.untyped_storage().nbytes() + self._scratch.nbytes

    def compute(
        self, slot: torch.Tensor, layer: int, form: str, hidden: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """`hidden` [n, H] and `weights` [n] through the expert of `layer` in `slot` (in `form`): [n, H], on the CPU."""
        with self._lock:
            module = self._restored(slot, layer, form)
            return module(hidden, weights).cpu()

    def is_rowwise(self, slot: torch.Tensor, layer: int, form: str) -> bool:
        """See `ExpertArithmetic.is_rowwise`."""
        with self._lock:
            key = layer, torch.get_num_threads()
            if key not in self._rowwise:
                self._restored(slot, layer, form)
                self._rowwise[key] = self._arithmetic.is_rowwise(layer, self._views[layer])
            return self._rowwise[key]

    def restore(self, slot: torch.Tensor, layer: int, form: str) -> None:
        """Restore the expert of `layer` in `slot` (in `form`), and compute nothing."""
        with self._lock:
            self._restored(slot, layer, form)

    def _restored(self, slot: torch.Tensor, layer: int, form: str) -> Module:
        if layer not in self._modules:
            self._views[layer] = self._store.views(self._full, layer)
            self._modules[layer] = self._arithmetic.bind(layer, self._views[layer])
        spec = self._store.manifest.form(form)
        restore_into(self._views[layer], spec.layers[layer].views(slot), spec.bits, self._scratch)
        return self._modules[layer]

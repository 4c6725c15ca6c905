"""Experts that were loaded in a smaller form, restored before they are computed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from checkpoint.expert import ExpertArithmetic
from checkpoint.forms import Scratch, restore_into
from checkpoint.store import ExpertStore
from checkpoint.tensors import aligned_buffer
from scheduler.errors import LaunchError


def restoring_bytes(store: ExpertStore, forms: tuple[str, ...], device: str = "cpu") -> int:
    """Device memory that a worker takes beside its slots, so that experts in these forms can be computed.

    Raises StoreError where the store lacks one of them.
    """
    groups = [store.manifest.form(form).group for form in forms if form]
    if not groups:
        return 0
    return store.manifest.blob_bytes + 5 * Scratch.weights_for([*store.manifest.layers.values()], max(groups), device)


class Restorer:
    """Device memory for one expert in full, and what restoring needs beside it; one computation at a time uses it.

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
        self._bound: dict[int, Callable[..., torch.Tensor]] = {}
        self._using = threading.Lock()

    @property
    def allocated_bytes(self) -> int:
        return self._full.untyped_storage().nbytes() + self._scratch.nbytes

    def compute(
        self, slot: torch.Tensor, layer: int, form: str, hidden: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """What the expert of `layer` whose `form` is in `slot` makes of `hidden` [n, H], weighted by `weights` [n]."""
        held = self._store.manifest.form(form)
        with self._using:
            if layer not in self._bound:
                self._views[layer] = self._store.views(self._full, layer)
                self._bound[layer] = self._arithmetic.bind(layer, self._views[layer])
            restore_into(self._views[layer], held.layers[layer].views(slot), held.bits, self._scratch)
            return self._bound[layer](hidden, weights).cpu()

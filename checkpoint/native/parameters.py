"""An expert's parameters from its bytes, in whatever form or encoding a store holds them.

All that computes with experts, or quantises them, reads them here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from checkpoint.family import parse_dtype
from checkpoint.forms import Scratch, compiled_routine, restore_into
from checkpoint.manifest import Manifest
from checkpoint.native.encodings import ENCODINGS
from checkpoint.native.products import EncodedProducts, are_possible
from checkpoint.tensors import aligned_buffer
from scheduler.errors import LaunchError

Parameters = dict[str, torch.Tensor]


def restoring_bytes(manifest: Manifest, forms: Sequence[str], device: str, threads: int) -> int:
    """Device memory for restoring experts in these forms, one at a time: the expert's own, scratch, and tables.

    0 where nothing has to be restored. `threads`: those of the node that restores; each has scratch memory of its own.
    Raises StoreError where the store lacks a form.
    """
    scratch = _form_scratch_weights(manifest, forms, device) * Scratch.WEIGHT_BYTES
    if _restores_native(manifest, forms):
        scratch += math.prod(_native_scratch(manifest, device, threads)) + ENCODINGS[manifest.encoding].table_bytes
    return manifest.restored_bytes + scratch if scratch else 0


def _form_scratch_weights(manifest: Manifest, forms: Sequence[str], device: str) -> int:
    groups = [manifest.form(form).group for form in forms if form]
    layers = [manifest.restored_layout(layer) for layer in manifest.layers]
    return Scratch.weights_for(layers, max(groups), device) if groups else 0


def _restores_native(manifest: Manifest, forms: Sequence[str]) -> bool:
    return bool(manifest.encoding) and "" in forms


def _native_scratch(manifest: Manifest, device: str, threads: int) -> tuple[int, int]:
    shapes = {spec.shape for full in manifest.full.values() for spec in full if len(spec.shape) == 2}
    return ENCODINGS[manifest.encoding].scratch_for(shapes, device, threads)


class ExpertParameters:
    """Restores experts of one store in memory that is allocated once, on one device. For one thread at a time.

    `threads`: how many restore an expert together, on a CPU. Raises StoreError where the store lacks one of `forms`,
    LaunchError where the device has no room.
    """

    def __init__(self, manifest: Manifest, forms: Sequence[str] = ("",), device: str = "cpu", *, threads: int) -> None:
        self._manifest = manifest
        self._full: torch.Tensor | None = None
        self._native: torch.Tensor | None = None
        self._of_forms: Scratch | None = None
        self._views: dict[int, Parameters] = {}
        self._threads = threads
        nbytes = restoring_bytes(manifest, forms, device, threads)
        if not nbytes:
            return
        try:
            self._full = _memory(manifest.restored_bytes, device)
            if _restores_native(manifest, forms):
                if device == "cpu":
                    ENCODINGS[manifest.encoding].checked_routine(parse_dtype(manifest.dtype))  # not at the first token
                shape = _native_scratch(manifest, device, threads)
                self._native = _memory(math.prod(shape), device).view(shape)
            if weights := _form_scratch_weights(manifest, forms, device):
                if device == "cpu":
                    for form in filter(None, forms):
                        compiled_routine(manifest.form(form).bits, parse_dtype(manifest.dtype))  # nor this one
                self._of_forms = Scratch.for_weights(weights, device)
        except torch.OutOfMemoryError as error:
            raise LaunchError(
                f"{device} has no room for {nbytes} bytes to restore an expert in; take fewer slots ({error})"
            ) from error

    @property
    def allocated_bytes(self) -> int:
        """Of the device. Tables count here for each who restores, though they share them."""
        held = sum(one.untyped_storage().nbytes() for one in (self._full, self._native) if one is not None)
        tables = ENCODINGS[self._manifest.encoding].table_bytes if self._native is not None else 0
        return held + tables + (self._of_forms.nbytes if self._of_forms else 0)

    def restores(self, layer: int, form: str = "") -> bool:
        """Whether `of` restores the experts of a layer: their parameters then always lie in the same memory, that of
        `memory`. Otherwise they are views of the blob."""
        return bool(form) or layer in self._manifest.full

    def memory(self, layer: int) -> Parameters:
        """The parameters that `of` fills when it restores an expert of this layer."""
        if layer not in self._views:
            if self._full is None:
                raise ValueError(f"experts of layer {layer} are not restored")
            # A view of another dtype that is made in inference mode could be written to in that mode only, and the next
            # thread that restores need not be in it.
            with torch.inference_mode(False):
                self._views[layer] = self._manifest.restored_layout(layer).views(self._full)
        return self._views[layer]

    def products(self) -> EncodedProducts | None:
        """Products with experts that are not restored, in this object's scratch memory. None where there are none."""
        encoding, dtype = ENCODINGS.get(self._manifest.encoding), parse_dtype(self._manifest.dtype)
        if self._native is None or encoding is None or not are_possible(encoding, dtype, self._native.device.type):
            return None
        return EncodedProducts(self._native)

    def of(self, blob: torch.Tensor, layer: int, form: str = "") -> Parameters:
        """The parameters of the expert whose bytes, in `form`, are in `blob` (uint8). Without expert dimension.

        Do not write to them. What is restored is valid until the next call.
        """
        if not self.restores(layer, form):
            return self._manifest.layers[layer].views(blob)
        full = self.memory(layer)
        if form and self._of_forms is not None:
            spec = self._manifest.form(form)
            restore_into(full, spec.layers[layer].views(blob), spec.bits, self._of_forms, self._threads)
        elif not form and self._native is not None:
            native = self._manifest.layers[layer].views(blob)
            ENCODINGS[self._manifest.encoding].restore_into(full, native, self._native)
        else:
            raise ValueError(f"form {form!r} was not among those to be restored")
        return full


def _memory(nbytes: int, device: str) -> torch.Tensor:
    return aligned_buffer(nbytes) if device == "cpu" else torch.empty(nbytes, dtype=torch.uint8, device=device)

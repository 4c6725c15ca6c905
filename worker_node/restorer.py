"""Restores experts that were loaded in a smaller form, or in an encoding, before they are computed.

Few rows are computed from the encoded bytes with the kernel `fast`, and one row where that gives the same bits: the
restored expert is not written then.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from checkpoint.encoded_experts import EncodedExpert, EncodedExperts, compute_together
from checkpoint.expert import Compute, ExpertArithmetic
from checkpoint.manifest import Manifest
from checkpoint.native.encoding import CODES
from checkpoint.native.parameters import ExpertParameters
from checkpoint.native.products import EncodedProducts, OutOfRangeError
from checkpoint.native.row_products import MOST_ROWS
from checkpoint.store import ExpertStore
from wire import runtime
from worker_node.module_cache import Module, ModuleCache

MODULES = 4096
"""Slots and layers whose modules or products are kept bound, some 10 KiB each: one for all would be too many."""

Occupancy = tuple[int, int]
"""A slot, and how often it was occupied: as long as both are the same, so is the expert."""


class SingleRows:
    """Computes single rows with experts that are not restored. Used by one computation at a time.

    The product is compiled, and compared for each shape, when this is made: at a worker's start, not at a token.
    """

    def __init__(self, manifest: Manifest, arithmetic: ExpertArithmetic, parameters: ExpertParameters) -> None:
        self._manifest = manifest
        self._arithmetic = arithmetic
        self._parameters = parameters
        self._products = parameters.products()
        self._computes: dict[tuple[int, int], Compute | None] = {}
        """Of a layer, by a number of threads. None: there are none, or not with the bits of the restored expert."""
        for layer in manifest.full:
            self._products_of(layer)

    def compute(
        self, slot: torch.Tensor, layer: int, hidden: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor | None:
        """`hidden` [1, H] through the expert of `layer` in `slot`: [1, H]. None: it has to be restored."""
        compute = self._computes.get((layer, torch.get_num_threads()))
        if compute is None or self._products is None:
            return None
        return self._compute_rows(self._products, compute, slot, layer, hidden, weights)

    def _compute_rows(
        self,
        products: EncodedProducts,
        compute: Compute,
        slot: torch.Tensor,
        layer: int,
        hidden: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor | None:
        products.expert = self._manifest.layers[layer].views(slot)
        try:
            return compute(hidden, weights)
        except OutOfRangeError:
            return None

    def compare(
        self, slot: torch.Tensor, layer: int, hidden: torch.Tensor, weights: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Choose for a layer, once, by the `output` of its restored expert."""
        key = layer, torch.get_num_threads()
        if key in self._computes:
            return
        products = self._products_of(layer)
        if products is None:
            self._computes[key] = None
        elif self._arithmetic.is_plain(layer, self._parameters.memory(layer)):
            compute = self._arithmetic.bind_products(layer, products.bind)
            found = self._compute_rows(products, compute, slot, layer, hidden, weights)
            if found is not None:
                same = torch.equal(found.view(torch.uint8), output.view(torch.uint8))
                self._computes[key] = compute if same else None

    def _products_of(self, layer: int) -> EncodedProducts | None:
        """The products with a layer's experts. None where a weight is not encoded, or the order of rounding differs."""
        if self._products is None or not self._arithmetic.is_transposed(layer):
            return None
        weights = [spec for spec in self._manifest.full[layer] if len(spec.shape) == 2]
        encoded = {spec.name for spec in self._manifest.layers[layer].tensors}
        if any(f"{spec.name}.{CODES}" not in encoded for spec in weights):
            return None
        return self._products if self._products.are_equal((spec.shape[0], spec.shape[1]) for spec in weights) else None


class Restorer:
    """Device memory for one full expert, and scratch memory for restoring it. Used by one computation at a time.

    `threads`: how many restore an expert together, on a CPU. Raises StoreError where the store lacks one of `forms`,
    LaunchError where the device has no room.
    """

    def __init__(
        self, store: ExpertStore, arithmetic: ExpertArithmetic, forms: tuple[str, ...], device: str, threads: int
    ) -> None:
        self._arithmetic, self._manifest = arithmetic, store.manifest
        self._parameters = ExpertParameters(store.manifest, forms, device, threads=threads)
        self._encoded = EncodedExperts(store.manifest, arithmetic, device)
        are_restored = not all(map(self._encoded.computes, store.manifest.full))
        self._single_rows = SingleRows(store.manifest, arithmetic, self._parameters) if are_restored else None
        self._of_slots = ModuleCache[EncodedExpert](MODULES)
        """Address of a slot and layer -> what computes few rows with the encoded expert in it."""
        self._modules: dict[int, Module] = {}
        self._rowwise: dict[tuple[int, int], bool] = {}
        self._last: tuple[Occupancy, int, str] | None = None
        """What was restored last, and is still in memory: occupancy, layer and form."""
        self._lock = runtime.Lock()
        self._counted: object = None

    @property
    def allocated_bytes(self) -> int:
        return self._parameters.allocated_bytes

    def counts(self, occupancy: object, form: str) -> bool:
        """Whether restoring takes time in a computation that has ended: from a smaller form, and not if the same
        occupancy's expert was the last one to be counted."""
        if not form or occupancy is self._counted:
            return False
        self._counted = occupancy
        return True

    def restores(self, layer: int, form: str) -> bool:
        """Whether the experts of a layer are restored from this form; otherwise they are computed as they are."""
        return self._parameters.restores(layer, form)

    def layout(self, layer: int) -> Hashable:
        """The same for layers whose experts are stored, and multiplied, in the same way."""
        return self._arithmetic.kernel, tuple((spec.name, spec.dtype) for spec in self._manifest.layers[layer].tensors)

    def compute(
        self,
        slot: torch.Tensor,
        layer: int,
        form: str,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        occupancy: Occupancy | None = None,
    ) -> torch.Tensor:
        """`hidden` [n, H] and `weights` [n] through the expert of `layer` in `slot` (in `form`): [n, H], on its device.

        An expert that was restored last, in the same `occupancy`, is not restored again.
        """
        with self._lock:
            if not form and len(hidden) <= MOST_ROWS and self._encoded.computes(layer):
                return self._bound(slot, layer)(hidden, weights)
            single = self._single_rows if not form and len(hidden) == 1 and self.restores(layer, form) else None
            if single is not None and (output := single.compute(slot, layer, hidden, weights)) is not None:
                return output
            output = self._restore(slot, layer, form, occupancy)(hidden, weights)
            if single is not None:
                single.compare(slot, layer, hidden, weights, output)
            return output

    def computes_together(self, layer: int, form: str) -> bool:
        """Whether `compute_together` computes a layer's experts, held in this form."""
        return not form and self._encoded.computes_together(layer)

    def compute_together(
        self, slots: Sequence[torch.Tensor], layer: int, hidden: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """As `compute`, of several experts of a layer, in their full form. Each has at most `MOST_ROWS` rows."""
        with self._lock:
            return compute_together([self._bound(slot, layer) for slot in slots], hidden, weights)

    def is_rowwise(self, slot: torch.Tensor, layer: int, form: str) -> bool:
        """See `ExpertArithmetic.is_rowwise`."""
        with self._lock:
            if not form and self._encoded.computes(layer):
                return self._encoded.is_rowwise(slot, layer)
            key = layer, torch.get_num_threads()
            if key not in self._rowwise:
                self._restore(slot, layer, form)
                self._rowwise[key] = self._arithmetic.is_rowwise(layer, self._parameters.memory(layer))
            return self._rowwise[key]

    def restore(self, slot: torch.Tensor, layer: int, form: str) -> None:
        """Restore the expert of `layer` in `slot` (in `form`), and compute nothing."""
        with self._lock:
            self._restore(slot, layer, form)

    def _bound(self, slot: torch.Tensor, layer: int) -> EncodedExpert:
        return self._of_slots.get((slot.data_ptr(), layer), lambda: self._encoded.bind(slot, layer))

    def _restore(self, slot: torch.Tensor, layer: int, form: str, occupancy: Occupancy | None = None) -> Module:
        this = None if occupancy is None else (occupancy, layer, form)
        if this is None or this != self._last:
            self._last = None  # it may fail half-way
            self._parameters.of(slot, layer, form)
            self._last = this
        if layer not in self._modules:  # bound with an expert in it: the first bind computes some rows
            self._modules[layer] = self._arithmetic.bind(layer, self._parameters.memory(layer))
        return self._modules[layer]

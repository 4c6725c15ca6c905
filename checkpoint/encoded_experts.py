"""Experts computed from their encoded bytes, with the kernel `fast`: nothing is restored."""

from __future__ import annotations

from collections.abc import Callable

import torch

from checkpoint.expert import PROBE_ROWS, Compute, ExpertArithmetic
from checkpoint.family import parse_dtype
from checkpoint.manifest import Manifest
from checkpoint.native.encodings import ENCODINGS
from checkpoint.native.row_products import MOST_ROWS, RowProduct, RowScratch, row_products

_SPREAD = 0.02
"""Standard deviation of the weights that the arithmetic is tried with."""


class EncodedExperts:
    """Binds a store's experts to the bytes that hold them. For one thread at a time.

    Which layers it can compute is found out when it is made, with random weights: an answer does not hang on which
    experts were there before.
    """

    def __init__(self, manifest: Manifest, arithmetic: ExpertArithmetic, device: str = "cpu") -> None:
        self._manifest = manifest
        self._arithmetic = arithmetic
        self._dtype = parse_dtype(manifest.dtype)
        self._scratch = RowScratch()
        self._rowwise: dict[tuple[int, int], bool] = {}
        self._layers: set[int] = set()
        if arithmetic.kernel == "fast" and manifest.encoding and device == "cpu":
            blob, plain = torch.empty(manifest.blob_bytes, dtype=torch.uint8), dict[object, bool]()
            for layer, specs in manifest.full.items():
                if specs not in plain:  # layers that are laid out alike are computed alike
                    plain[specs] = self._is_plain(layer)
                if plain[specs] and self._products(blob, layer):
                    self._layers.add(layer)

    def computes(self, layer: int) -> bool:
        """Whether a layer's experts can be computed so."""
        return layer in self._layers

    def bind(self, blob: torch.Tensor, layer: int) -> Compute:
        """The expert of `layer`, of those that it `computes`, whose bytes are, and stay, in `blob`. For at most
        `MOST_ROWS` rows."""
        return self._arithmetic.bind_products(layer, self._products(blob, layer).__getitem__)

    def _products(self, blob: torch.Tensor, layer: int) -> dict[str, RowProduct]:
        """By weight. Empty where one has none."""
        encoding, tensors = ENCODINGS[self._manifest.encoding], self._manifest.layers[layer].views(blob)
        found: dict[str, RowProduct] = {}
        for spec in self._manifest.full[layer]:
            if len(spec.shape) != 2:
                continue
            parts, shape = encoding.parts_of(spec.name, tensors), (spec.shape[0], spec.shape[1])
            product = row_products(encoding, shape, parts, self._dtype, self._scratch) if parts else None
            if product is None:
                return {}
            found[spec.name] = _with_bias(product, tensors.get(f"{spec.name}_bias"))
        return found

    def is_rowwise(self, blob: torch.Tensor, layer: int) -> bool:
        """See `ExpertArithmetic.is_rowwise`. The products are; what stands between them is compared."""
        key = layer, torch.get_num_threads()
        if key not in self._rowwise:
            self._rowwise[key] = self._is_rowwise(self.bind(blob, layer), layer)
        return self._rowwise[key]

    def _is_rowwise(self, compute: Compute, layer: int) -> bool:
        views = {
            spec.name: torch.empty(spec.shape, dtype=parse_dtype(spec.dtype)) for spec in self._manifest.full[layer]
        }
        hidden, weights = self._arithmetic.random_rows(layer, views, max(PROBE_ROWS))
        own = torch.cat([compute(*one) for one in zip(hidden.split(1), weights.split(1), strict=True)])
        return all(torch.equal(compute(hidden[:rows], weights[:rows]), own[:rows]) for rows in PROBE_ROWS)

    def _is_plain(self, layer: int) -> bool:
        """Whether the family's arithmetic is two products and what stands between them."""
        if self._arithmetic.is_transposed(layer) is not ENCODINGS[self._manifest.encoding].inputs_first:
            return False
        generator = torch.Generator().manual_seed(0)
        views = {
            spec.name: (torch.randn(spec.shape, generator=generator) * _SPREAD).to(parse_dtype(spec.dtype))
            for spec in self._manifest.full[layer]
        }
        return self._arithmetic.is_plain(layer, views)


def few_or_many(few: Compute, many: Callable[[], Compute]) -> Compute:
    """`few` for at most `MOST_ROWS` rows, else what `many` makes at each call."""

    def compute(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (few if len(hidden) <= MOST_ROWS else many())(hidden, weights)

    return compute


def _with_bias(product: RowProduct, bias: torch.Tensor | None) -> RowProduct:
    if bias is None:
        return product
    return lambda rows: product(rows) + bias

"""Experts computed from their encoded bytes, with the kernel `fast`: nothing is restored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from checkpoint.devices.inference import inference
from checkpoint.expert import PROBE_ROWS, Compute, ExpertArithmetic
from checkpoint.family import parse_dtype
from checkpoint.manifest import Manifest
from checkpoint.native.encodings import ENCODINGS
from checkpoint.native.row_products import MOST_ROWS, RowProduct, RowScratch, multiply, row_products

_SPREAD = 0.02
"""Standard deviation of the weights that the arithmetic is tried with."""


@dataclass(frozen=True, slots=True)
class EncodedExpert:
    """An expert, bound to the bytes that hold it. For at most `MOST_ROWS` rows."""

    up: RowProduct
    down: RowProduct
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    activation: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return compute_together([self], [hidden], [weights])[0]


def compute_together(
    experts: Sequence[EncodedExpert], hidden: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Experts of one layer, each with its rows [n, H] and routing weights [n]: their outputs [n, H]. If all
    rows are those of the first expert, they are given as the same tensor. See `EncodedExperts.computes_together`."""
    with inference():
        counts = [len(rows) for rows in hidden]
        are_shared = all(rows is hidden[0] for rows in hidden)
        rows = hidden[0] if are_shared else torch.cat(list(hidden))
        inner = multiply([one.up for one in experts], rows, counts)
        inner = experts[0].activation(_with_biases(inner, [one.up_bias for one in experts], counts))
        output = multiply([one.down for one in experts], inner, counts)
        output = _with_biases(output, [one.down_bias for one in experts], counts)
        output = output * (torch.cat(list(weights)) if len(weights) > 1 else weights[0]).view(-1, 1)
        return output.to(rows.dtype).split(counts)


def _with_biases(output: torch.Tensor, biases: Sequence[torch.Tensor | None], counts: Sequence[int]) -> torch.Tensor:
    for rows, bias in zip(output.split(list(counts)), biases, strict=True):
        if bias is not None:
            rows += bias
    return output


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
        self._together: set[int] = set()
        self._activations: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
        if arithmetic.kernel == "fast" and manifest.encoding and device == "cpu":
            blob, plain = torch.empty(manifest.blob_bytes, dtype=torch.uint8), dict[object, bool]()
            for layer, specs in manifest.full.items():
                if specs not in plain:  # layers that are laid out alike are computed alike
                    plain[specs] = self._is_plain(layer)
                if plain[specs] and self._products(manifest.layers[layer].views(blob), layer):
                    self._layers.add(layer)
                    if arithmetic.is_elementwise(layer):
                        self._together.add(layer)

    def computes(self, layer: int) -> bool:
        """Whether a layer's experts can be computed so."""
        return layer in self._layers

    def computes_together(self, layer: int) -> bool:
        """Whether `compute_together` gives rows of several experts, or requests, the bits that they have alone."""
        return layer in self._together

    def bind(self, blob: torch.Tensor, layer: int) -> EncodedExpert:
        """The expert of `layer`, of those that it `computes`, whose bytes are, and stay, in `blob`."""
        tensors = self._manifest.layers[layer].views(blob)
        found = self._products(tensors, layer)
        up, down = self._arithmetic.products(layer)
        if layer not in self._activations:
            self._activations[layer] = self._arithmetic.activation(layer)
        biases = tensors.get(f"{up}_bias"), tensors.get(f"{down}_bias")
        return EncodedExpert(found[up], found[down], *biases, self._activations[layer])

    def _products(self, tensors: dict[str, torch.Tensor], layer: int) -> dict[str, RowProduct]:
        """By weight. Empty where one has none."""
        encoding, found = ENCODINGS[self._manifest.encoding], dict[str, RowProduct]()
        for spec in self._manifest.full[layer]:
            if len(spec.shape) != 2:
                continue
            parts, shape = encoding.parts_of(spec.name, tensors), (spec.shape[0], spec.shape[1])
            product = row_products(encoding, shape, parts, self._dtype, self._scratch) if parts else None
            if product is None:
                return {}
            found[spec.name] = product
        return found

    def is_rowwise(self, blob: torch.Tensor, layer: int) -> bool:
        """See `ExpertArithmetic.is_rowwise`. The products are; what stands between them is compared."""
        key = layer, torch.get_num_threads()
        if key not in self._rowwise:
            self._rowwise[key] = self.computes_together(layer) and self._is_rowwise(self.bind(blob, layer), layer)
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

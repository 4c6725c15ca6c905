"""The kernel that multiplies a few rows with a weight on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from checkpoint import float_tiles, inputs_first

MOST_ROWS = {"exact": 32, "fast": 128}
"""With more rows than 32, `linear` with AMX sums in another order than the weight first does."""
PROBE_ROWS = (2, 3, 8, 16, 17, 32)
"""A product of one row is compared alone; these stand for all of several rows. A tile of AMX has 16."""
SHARED_ROWS = MOST_ROWS["exact"]
"""Most rows of a product that requests share bit for bit."""
LEAST_WEIGHTS = 1 << 16
"""In a smaller product, the order of the operands makes no difference that outweighs the choice."""
LARGEST_PROBE = 1 << 28
"""Bytes of the largest weight that is made for a comparison. A larger one has enough outputs to be compared itself."""
_PERIOD = 64
"""Random rows of a probe's weight, which repeat: to draw them all takes longer than the products."""

Shape = tuple[int, int, int, bool]
"""Inputs, outputs, threads, and whether there are several rows: what the order of summation depends on."""


class Linear:
    """`torch.nn.functional.linear`, in the faster of two orders of its operands.

    `linear(rows, weight)` makes the weight the second operand of oneDNN's product, which AMX reads in a packed layout.
    For few rows, packing takes longer than the product. With the weight as the first operand (`torch.mv(weight, row)`,
    `torch.mm(weight, rows.t())`) nothing is packed. The kernel `exact` takes the weight first only where a comparison,
    once for a shape, finds it equal to `linear` bit for bit. The kernel `fast` does without the comparison. Only
    bfloat16 has two orders to choose from: float32 takes the same kernel in both.

    Where the CPU has no products in bfloat16, `fast` multiplies several rows by `checkpoint.float_tiles`.
    """

    def __init__(self, kernel: str = "exact") -> None:
        self.kernel = kernel
        self._most_rows = MOST_ROWS[kernel]
        self._weight_first: dict[Shape, bool] = {}
        self._rowwise: dict[tuple[torch.Size, torch.dtype, int], bool] = {}

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., K], [N, K], [N] -> [..., N]"""
        return self.bind(weight, bias)(rows)

    def bind(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
        """The product with this weight [N, K] and bias [N]: [..., K] -> [..., N]."""
        outputs, inputs = weight.shape
        if self.is_tiled(float_tiles.LEAST_ROWS, weight):
            return lambda rows: self._by_tiles(rows, weight, bias)
        if bias is not None or weight.numel() < LEAST_WEIGHTS or not self.is_weight_first(1, weight):
            return lambda rows: functional.linear(rows, weight, bias)
        most_rows, threads = self._most_rows, torch.get_num_threads()

        def product(rows: torch.Tensor) -> torch.Tensor:
            count = rows.numel() // inputs
            if count == 1 and torch.get_num_threads() == threads:
                return torch.mv(weight, rows.reshape(inputs)).view(*rows.shape[:-1], outputs)
            if 0 < count <= most_rows and self.is_weight_first(count, weight):
                return weight_first(rows.reshape(count, inputs), weight).view(*rows.shape[:-1], outputs)
            return functional.linear(rows, weight)

        return product

    def bind_inputs_first(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """The product with this weight [K, N]: [n, K] -> [n, N]."""
        if self.is_tiled(float_tiles.LEAST_ROWS, weight):
            return lambda rows: float_tiles.multiply_inputs_first(rows, weight)
        if weight.numel() >= LEAST_WEIGHTS and inputs_first.has_products(weight):
            return lambda rows: inputs_first.multiply(rows, weight)
        return lambda rows: rows @ weight

    def is_tiled(self, count: int, weight: torch.Tensor) -> bool:
        """Whether `count` rows are multiplied in float32, a tile of the weight at a time."""
        return self.kernel == "fast" and weight.numel() >= LEAST_WEIGHTS and float_tiles.is_tiled(count, weight)

    def _by_tiles(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        outputs, inputs = weight.shape
        if not self.is_tiled(rows.numel() // inputs, weight):
            return functional.linear(rows, weight, bias)
        found = float_tiles.multiply(rows.reshape(-1, inputs), weight, bias)
        return found.view(*rows.shape[:-1], outputs)

    def is_weight_first(self, count: int, weight: torch.Tensor) -> bool:
        """Whether `count` rows are multiplied with the weight first. The first call for a shape finds out."""
        if weight.dtype is not torch.bfloat16 or weight.device.type != "cpu":
            return False
        shape = (*weight.shape, torch.get_num_threads(), count > 1)
        chosen = self._weight_first.get(shape)
        if chosen is None:
            counts = (1,) if count == 1 else PROBE_ROWS
            chosen = is_faster() and (self.kernel == "fast" or is_equal(counts, weight))
            self._weight_first[shape] = chosen
        return chosen

    def is_rowwise(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
        """Whether each row of a product of at most `SHARED_ROWS` rows has the bits of its own product, so that requests
        can share it. The first call for a shape finds out, by comparison."""
        if bias is not None or weight.device.type != "cpu" or weight.dtype is torch.float32:
            return False  # in float32 the last bit depends on where a row lies in memory, too
        shape = (weight.shape, weight.dtype, torch.get_num_threads())
        if shape not in self._rowwise:
            self._rowwise[shape] = all(self._is_rowwise(*probe) for probe in probes((SHARED_ROWS,), weight))
        return self._rowwise[shape]

    def _is_rowwise(self, rows: torch.Tensor, weight: torch.Tensor) -> bool:
        own: list[torch.Tensor] = []
        for count in PROBE_ROWS:
            own += [self(row, weight) for row in rows[len(own) : count].split(1)]
            if not torch.equal(self(rows[:count], weight), torch.cat(own)):
                return False
        return True

    def replace_in(self, model: Any) -> None:
        """Let the model's linear layers multiply with this kernel."""
        for module in model.modules():
            if type(module) is not torch.nn.Linear or module.weight.numel() < LEAST_WEIGHTS:
                continue
            weight_first = module.bias is None and self.is_weight_first(1, module.weight)
            if weight_first or self.is_tiled(float_tiles.LEAST_ROWS, module.weight):
                module.__class__ = KernelLinear
                vars(module)["kernel"] = self


class KernelLinear(torch.nn.Linear):
    """A linear layer that multiplies with `kernel`: single rows, if it has no bias, and several by tiles. A copy with
    weights of another dtype multiplies as `torch.nn.Linear` does."""

    kernel: Linear

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        count = input.numel() // weight.shape[1]
        if count == 1 and bias is None and self.kernel.is_weight_first(1, weight):
            return torch.mv(weight, input.reshape(-1)).view(*input.shape[:-1], weight.shape[0])
        if self.kernel.is_tiled(count, weight):
            return self.kernel.bind(weight, bias)(input)
        return functional.linear(input, weight, bias)


EXACT = Linear()
"""One for the process: what is measured once holds for all nodes in it."""
FAST = Linear("fast")


def linear_of(kernel: str) -> Linear:
    """The kernel of that name."""
    return {"exact": EXACT, "fast": FAST}[kernel]


def is_equal(counts: Sequence[int], weight: torch.Tensor) -> bool:
    """Whether both orders give the same bits for these numbers of rows and a weight of this shape."""
    return all(torch.equal(functional.linear(*probe), weight_first(*probe)) for probe in probes(counts, weight))


def probes(counts: Sequence[int], weight: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows [n, K] and a weight [N, K] of the given one's shape, to compare kernels with.

    Each sum cancels to zero in exact arithmetic, so the result is the rounding error of the order of summation. Orders
    that differ then differ in nearly every output. Of random numbers, one output in 10,000 shows it.
    """
    inputs, generator = weight.shape[1], torch.Generator().manual_seed(0)
    if weight.nbytes > LARGEST_PROBE:
        return [(torch.randn(n, inputs, generator=generator).to(weight), weight) for n in counts for _ in range(4)]
    first, second = torch.randperm(inputs, generator=generator)[: inputs // 2 * 2].chunk(2)
    period, rows = torch.zeros(_PERIOD, inputs), torch.zeros(max(counts), inputs)
    period[:, first] = torch.randn(_PERIOD, len(first), generator=generator)
    period[:, second] = -period[:, first]
    rows[:, first] = rows[:, second] = torch.randn(len(rows), len(first), generator=generator)
    made = period.to(weight.dtype).repeat(-(-len(weight) // _PERIOD), 1)[: len(weight)]
    return [(rows[:n].to(weight.dtype), made) for n in counts]


def is_faster() -> bool:
    """Whether this CPU multiplies few rows faster with the weight first: 1.2 to 2 times with AMX, 0.6 without."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def weight_first(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # [n, K], [N, K] -> [n, N]
    if len(rows) == 1:
        return torch.mv(weight, rows[0]).unsqueeze(0)
    return torch.mm(weight, rows.t()).t().contiguous()

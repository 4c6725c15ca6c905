"""A linear layer whose weight stays encoded in memory. Some rows of it at a time are restored when it is used.

All layers of a model share the memory in which their weights are restored (`LinearScratch`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch.nn import functional

from checkpoint.kernels import EXACT, FAST, PROBE_ROWS, Linear, probes
from checkpoint.native.encoding import SCALES, Encoding, Parts
from checkpoint.native.row_products import MOST_ROWS, RowProduct, RowScratch, row_products
from checkpoint.native.threads import together
from checkpoint.row_attention import use_row_attention
from checkpoint.tensors import aligned_buffer, round_up

PIECE_VALUES = 1 << 20
"""Values of a weight that a thread restores at a time: as many as stay in its cache until they have been multiplied."""

_EVEN_ROWS = 128
"""Of a piece. Blocks of scales are as high, or divide it."""
_LARGEST_PROBE = 1 << 25
"""Bytes of the largest weight with which products by pieces are compared. Of a larger one, as many rows are."""
_MANY_ROWS = 128
_ALIGN = 64
"""Bytes."""


class EncodedLinear(torch.nn.Module):
    """As `torch.nn.Linear`, with the bits of one that has the restored weight.

    `weight` restores all of it, for whoever reads it otherwise than by calling the layer. `few_rows`: a product of a
    few rows with the encoded weight, that need not have these bits; None where there is none.
    """

    few_rows: RowProduct | None = None

    def __init__(self, in_features: int, out_features: int, bias: torch.nn.Parameter | None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.bias = bias
        self._encoding: Encoding | None = None
        self._dtype = torch.float32
        self._scratch: tuple[LinearScratch, ...] = ()  # not a submodule: it is the model's
        self._names: tuple[str, ...] = ()

    def fill(self, encoding: Encoding, parts: Parts, dtype: torch.dtype) -> None:
        """Take over the parts of the weight, which is restored in `dtype`."""
        self._encoding, self._dtype, self._names = encoding, dtype, tuple(parts)
        for name, part in parts.items():
            self.register_buffer(name, part, persistent=False)

    def share(self, scratch: LinearScratch) -> None:
        self._scratch = (scratch,)

    @property
    def encoding(self) -> Encoding:
        """Raises RuntimeError before `fill`."""
        if self._encoding is None:
            raise RuntimeError("the weight of an encoded layer has not been loaded")
        return self._encoding

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """Of the weight, by the names that its encoding has for them."""
        return {name: self.get_buffer(name) for name in self._names}

    @property
    def dtype(self) -> torch.dtype:
        """Of the restored weight."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self.get_buffer(self._names[0]).device

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def weight(self) -> torch.Tensor:
        """[out, in], restored in memory of its own."""
        return self._scratch[0].restored(self)

    def restored(self) -> torch.nn.Linear:
        """A layer with the restored weight in memory of its own."""
        found = torch.nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        found.weight = torch.nn.Parameter(self.weight, requires_grad=False)
        found.register_parameter("bias", self.bias)
        return found

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, self.in_features)
        if self.few_rows is not None and len(rows) <= MOST_ROWS:
            with self._scratch[0].lock:  # these products may share scratch memory, too
                out = self.few_rows(rows)
            out = out if self.bias is None else out + self.bias
        else:
            out = self._scratch[0].multiply(self, rows)
        return out.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


@dataclass(frozen=True)
class _Kind:
    """What layers have in common whose weights are restored alike."""

    shape: tuple[int, int]
    dtype: torch.dtype
    encoding: Encoding
    heights: frozenset[int]
    """Rows of the weight for each row of a part."""

    @staticmethod
    def of(layer: EncodedLinear) -> _Kind:
        parts = layer.parts
        heights = frozenset(filter(None, (_height(parts, name, layer.out_features) for name in parts)))
        return _Kind(layer.shape, layer.dtype, layer.encoding, heights)

    def step(self, device: torch.device, threads: int) -> int:
        """How many rows of a weight are restored at a time."""
        step = piece_rows(self.shape, self.dtype, device, threads)
        return self.shape[0] if any(step % height for height in self.heights) else step


class LinearScratch(torch.nn.Module):
    """Memory in which the weights of a model's encoded layers are restored, for one layer at a time.

    It lies where the layers' weights do, and is made there when it is first needed. On a CPU each thread has a piece
    of its own, and both restores and multiplies: torch's threads, which spin for a while after each product, would
    take the cores from those that restore the next piece.
    """

    def __init__(self, layers: list[EncodedLinear]) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.linear = EXACT
        """Multiplies with restored weights."""
        self._threads = torch.get_num_threads()
        self._prepared: torch.device | None = None
        """What the memory was made for: buffers may have been moved since."""
        self._kinds = {_Kind.of(layer) for layer in layers}  # no reference to the layers, which others may replace
        self._target: torch.Tensor | None
        self._work: torch.Tensor | None
        self.register_buffer("_target", None, persistent=False)
        self.register_buffer("_work", None, persistent=False)
        for layer in layers:
            layer.share(self)

    def prepare(self, device: torch.device) -> None:
        """Make the memory on a device, and compile what restores. Raises torch.OutOfMemoryError."""
        threads = self._threads if device.type == "cpu" else 1
        self._prepared = device
        each = nbytes = 0
        for kind in self._kinds:
            outputs, inputs = kind.shape
            step = kind.step(device, self._threads)
            piece = round_up(step * inputs * kind.dtype.itemsize, _ALIGN)
            nbytes = max(nbytes, piece if step >= outputs else threads * piece)
            each = max(each, kind.encoding.scratch_for([(step, inputs)], device.type, threads)[1])
        with torch.inference_mode(False):
            if device.type == "cpu":
                self._target, self._work = aligned_buffer(nbytes), aligned_buffer(threads * each).view(threads, each)
            else:
                self._target = torch.empty(nbytes, dtype=torch.uint8, device=device)
                self._work = torch.empty(threads, each, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            for kind in self._kinds:
                kind.encoding.checked_routine(kind.dtype)

    def multiply(self, layer: EncodedLinear, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n, in] with a layer's weight and bias: [n, out]."""
        step = _Kind.of(layer).step(rows.device, self._threads)
        with self.lock:
            target, work = self._memory(rows.device)
            if step >= layer.out_features:
                weight = _in(target, layer, layer.out_features)
                restore(layer, weight, 0, work)
                return self.linear(rows, weight, layer.bias)
            out = rows.new_empty(len(rows), layer.out_features)
            shares = target.split(len(target) // self._threads // _ALIGN * _ALIGN)
            firsts = range(0, layer.out_features, step)
            jobs = [
                partial(
                    _multiply_pieces,
                    self.linear,
                    layer,
                    rows,
                    out,
                    step,
                    firsts[number :: self._threads],
                    shares[number],
                    work[number : number + 1],
                )
                for number in range(min(self._threads, len(firsts)))
            ]
            if self._threads == 1:
                jobs[0]()
            else:
                together(jobs)
        return out

    def restored(self, layer: EncodedLinear) -> torch.Tensor:
        """A layer's weight in memory of its own."""
        found = torch.empty(layer.shape, dtype=layer.dtype, device=layer.device)
        with self.lock:
            restore(layer, found, 0, self._memory(layer.device)[1])
        return found

    def _memory(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if self._target is None or self._prepared != device:
            self.prepare(device)
        if self._target is None or self._work is None:
            raise RuntimeError("there is no memory to restore weights in")
        return self._target, self._work


def _multiply_pieces(
    linear: Linear,
    layer: EncodedLinear,
    rows: torch.Tensor,
    out: torch.Tensor,
    step: int,
    firsts: range,
    target: torch.Tensor,
    work: torch.Tensor,
) -> None:
    """Fill columns of `out`, those of the pieces of `step` rows of the weight that begin at `firsts`."""
    for first in firsts:
        last = min(first + step, layer.out_features)
        weight = _in(target, layer, last - first)
        restore(layer, weight, first, work)
        bias = None if layer.bias is None else layer.bias[first:last]
        out[:, first:last] = linear(rows, weight, bias)


def _in(target: torch.Tensor, layer: EncodedLinear, rows: int) -> torch.Tensor:
    """The place in `target` (uint8) of some rows of a layer's weight."""
    count = rows * layer.in_features * layer.dtype.itemsize
    return target[:count].view(layer.dtype).view(rows, layer.in_features)


def restore(layer: EncodedLinear, target: torch.Tensor, first: int, work: torch.Tensor) -> None:
    """Fill `target` [n, in] with rows of a layer's weight from `first` on. `work`: scratch for one thread or more."""
    parts = _rows(layer.parts, layer.out_features, first, first + len(target))
    layer.encoding.restore_into({"weight": target}, {f"weight.{name}": part for name, part in parts.items()}, work)


def use_fast_kernel(model: torch.nn.Module) -> None:
    """Let a model's encoded layers multiply with the kernel `fast`, few rows with the weights as they are; and let it
    attend with this kernel."""
    use_row_attention(model)
    scratch = RowScratch()
    for module in model.modules():
        if isinstance(module, LinearScratch):
            module.linear = FAST
        elif isinstance(module, EncodedLinear):
            module.few_rows = row_products(module.encoding, module.shape, module.parts, module.dtype, scratch)


def _rows(parts: Parts, count: int, first: int, last: int) -> Parts:
    """The parts of rows first..last - 1 of `count`, which are whole blocks of scales.

    As `shares_of_rows` does: a part with as many rows as the codes or the scales is divided, any other is everybody's.
    """
    found = {}
    for name, part in parts.items():
        height = _height(parts, name, count)
        found[name] = part[first // height : last // height] if height else part
    return found


def _height(parts: Parts, name: str, count: int) -> int:
    """How many of `count` rows of a weight each row of a part is for; 0 for all, where the part is not divided."""
    rows = len(parts[name])
    return count // rows if rows > 1 and rows in (count, len(parts[SCALES])) else 0


@cache
def piece_rows(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, threads: int) -> int:
    """How many rows of a weight [out, in] to restore at a time, on each of so many threads: all, where pieces would
    change a bit of a product.

    The first call for a shape finds out, by comparison.
    """
    outputs, inputs = shape
    most = min(PIECE_VALUES // inputs, -(-outputs // threads))
    step = max(most // _EVEN_ROWS, 1) * _EVEN_ROWS
    if device.type != "cpu" or step >= outputs:
        return outputs
    fits = max(_LARGEST_PROBE // (inputs * dtype.itemsize) // step, 1) * step
    compared = outputs if outputs <= fits else fits + outputs % step
    like = torch.empty(compared, inputs, dtype=dtype)
    return step if all(_is_equal(*probe, step) for probe in probes((1, *PROBE_ROWS, _MANY_ROWS), like)) else outputs


def _is_equal(rows: torch.Tensor, weight: torch.Tensor, step: int) -> bool:
    """Whether pieces, each multiplied by one thread, give the bits of the whole, which this thread multiplies."""
    found = [torch.empty(0)]

    def multiply() -> None:
        found[0] = torch.cat([functional.linear(rows, some) for some in weight.split(step)], dim=1)

    together([multiply])
    return torch.equal(functional.linear(rows, weight), found[0])

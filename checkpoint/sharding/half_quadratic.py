"""Half-quadratic quantisation (HQQ): the same numbers, scales and zeros as `hqq.core.quantize.Quantizer`, bit for bit.

HQQ refines each group's zero for up to `ITERATIONS` times: quantise, take the error's shrunk part off the weights, and
let the zero be the mean of what is left. It stops once the mean error of the whole tensor grows. Quantizer computes
that on the whole tensor in float32, some twenty passes over fresh memory an iteration, which is what takes its time.

Here it is computed in pieces that stay in a core's cache, and

- a group whose zero an iteration leaves as it was is not computed again: its next zero follows from this one alone;
- the shrunk part is not computed where it is zero, which is wherever no error exceeds `UNSHRUNK`.

The mean error is summed over all of the tensor at once, in torch's order, since it decides when to stop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ITERATIONS = 20
BETA = 10.0
NORM = 0.7
"""The exponent p of the error's l_p norm."""

UNSHRUNK = 0.15
"""An error e of at most this size shrinks to zero: e <= e ** (NORM - 1) / BETA, which holds up to 0.170."""

LEAST_RANGE = 1e-4
MOST_SCALE = 2e4

PIECE = 2048
"""Groups at a time. Three float32 buffers of so many groups of 64 fit into a core's second-level cache."""


@torch.no_grad()
def quantised(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers (uint8 [rows, group]), scale and zero (float32 [rows, 1]) of `groups` [rows, group], of any float dtype.

    A weight is (number - zero) * scale. `group` must be a multiple of 64: torch computes powers in a remainder behind
    whole vectors in another way. The number of torch's threads changes the last bits of the mean error, which decides
    when to stop: one thread gives what Quantizer gives with one.
    """
    refining = _Refining(groups, 2**bits - 1)
    refining.run()
    return refining.numbers(), 1.0 / refining.scale, refining.zero


class _Refining:
    """The zeros of one tensor while they are refined. `scale` is the inverse of a weight's scale, as in HQQ."""

    def __init__(self, groups: torch.Tensor, most: int) -> None:
        self._groups, self._most = groups, most
        rows, width = groups.shape
        self._step = max(1, min(PIECE, rows))
        self._buffers = _Buffers.of(self._step, width, groups.dtype)
        low, high = torch.empty(rows, 1), torch.empty(rows, 1)
        for piece in self._pieces(rows):
            weights = self._weights(piece, None)
            torch.amin(weights, dim=1, keepdim=True, out=low[piece])
            torch.amax(weights, dim=1, keepdim=True, out=high[piece])
        spread = high - low
        scale = torch.where(spread.abs() <= LEAST_RANGE, torch.ones(()), most / spread)
        self.scale = scale.clamp(max=MOST_SCALE)
        self.zero = -low * self.scale
        self._errors = torch.empty(rows, width)
        """Absolute errors of all weights by the zeros before the last iteration."""

    def run(self) -> None:
        """Refine the zeros until the mean error grows, or none changes any more."""
        scale, zero, best = self.scale, self.zero, torch.tensor(torch.inf)
        active: torch.Tensor | None = None
        for _ in range(ITERATIONS):
            refined = self._refined(active, scale, zero)
            error = self._errors.mean()
            if active is None:
                self.zero = refined.clone()
            else:
                self.zero.index_copy_(0, active, refined)
            changed = (refined.view(torch.int32) != zero.view(torch.int32)).view(-1).nonzero().view(-1)
            if not bool(error < best) or not len(changed):
                return
            best = error
            active = changed if active is None else active[changed]
            scale, zero = scale[changed], refined[changed]

    def numbers(self) -> torch.Tensor:
        """The weights as numbers by the zeros found."""
        found = torch.empty(self._groups.shape, dtype=torch.uint8)
        for piece in self._pieces(len(found)):
            rounded = self._rounded(self._weights(piece, None), self.scale[piece], self.zero[piece])
            found[piece].copy_(rounded)
        return found

    def _refined(self, active: torch.Tensor | None, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """The next zeros of the `active` groups (None: all), whose scale and zero are given; their errors are noted."""
        refined = torch.empty_like(zero)
        for piece in self._pieces(len(zero)):
            rows = None if active is None else active[piece]
            weights = self._weights(piece, rows)
            numbers = self._rounded(weights, scale[piece], zero[piece])
            errors = torch.sub(numbers, zero[piece], out=self._buffers.errors[: len(weights)]).div_(scale[piece])
            torch.sub(weights, errors, out=errors)
            least, most = torch.aminmax(errors)
            if not (-UNSHRUNK <= least and most <= UNSHRUNK):  # so that NaN shrinks as in HQQ
                weights.sub_(_shrunk(errors))
            if rows is None:
                torch.abs(errors, out=self._errors[piece])
            else:
                self._errors.index_copy_(0, rows, errors.abs_())
            torch.mean(numbers.sub_(weights.mul_(scale[piece])), dim=1, keepdim=True, out=refined[piece])
        return refined

    def _pieces(self, rows: int) -> list[slice]:
        return [slice(first, min(first + self._step, rows)) for first in range(0, rows, self._step)]

    def _weights(self, piece: slice, rows: torch.Tensor | None) -> torch.Tensor:
        """The weights of these groups in float32, in a buffer that the next call overwrites."""
        if rows is None:
            source = self._groups[piece]
        else:
            source = torch.index_select(self._groups, 0, rows, out=self._buffers.source[: len(rows)])
        return self._buffers.weights[: len(source)].copy_(source)

    def _rounded(self, weights: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        numbers = torch.mul(weights, scale, out=self._buffers.numbers[: len(weights)])
        return numbers.add_(zero).round_().clamp_(0, self._most)


@dataclass(frozen=True)
class _Buffers:
    """For one piece, [rows, group]."""

    source: torch.Tensor
    """In the weights' own dtype; the others in float32."""
    weights: torch.Tensor
    numbers: torch.Tensor
    errors: torch.Tensor

    @staticmethod
    def of(rows: int, width: int, dtype: torch.dtype) -> _Buffers:
        return _Buffers(torch.empty(rows, width, dtype=dtype), *(torch.empty(rows, width) for _ in range(3)))


def _shrunk(errors: torch.Tensor) -> torch.Tensor:
    """HQQ's shrinkage: sign(e) max(0, |e| - |e| ** (p - 1) / beta)."""
    size = errors.abs()
    size.sub_((1.0 / BETA) * size.pow(NORM - 1)).clamp_min_(0.0)
    return size.mul_(torch.sign(errors))

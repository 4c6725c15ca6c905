"""Outputs of experts, as workers send them: what must hold of each before it becomes part of an answer."""

from __future__ import annotations

import math

import torch

from checkpoint.family import dtype_name
from checkpoint.tensors import received_tensor
from scheduler.errors import ProtocolError
from wire.checksums import tensor_checksum
from wire.messages import Computed, LocalTensor, Tensor

_SURELY = 0.98
"""More than a root of `rough_square` may be wrong by."""


def read_output(output: Tensor | LocalTensor, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A worker's output [n, H] for the rows `hidden` [n, H] and `weights` [n]. Raises ProtocolError for one of another
    shape or dtype."""
    try:
        received = received_tensor(output)
        kinds = (hidden.dtype, torch.promote_types(hidden.dtype, weights.dtype))
        if received.dtype in kinds and received.shape == hidden.shape:
            return received
    except (RuntimeError, ValueError, KeyError):  # KeyError: an unknown dtype
        pass
    raise ProtocolError(
        f"an expert's output has {memoryview(output.data).nbytes} bytes, shape {tuple(output.shape)} and dtype "
        f"{output.dtype}; "
        f"its input has shape {tuple(hidden.shape)} and dtype {dtype_name(hidden.dtype)}"
    )


def is_intact(message: Computed) -> bool:
    """The output is the one that the worker computed, as far as its checksum tells."""
    return not message.checksum or tensor_checksum(message.output) == message.checksum


_LONG = 1 << 13
"""From so many elements on, `dot` in bfloat16 takes longer than the norm."""


def is_usable(output: torch.Tensor) -> bool:
    """Its norm is a finite float32: the model's own normalisation could not use any other, though each element may be
    finite."""
    if (output.dtype is not torch.bfloat16 or output.numel() < _LONG) and math.isfinite(rough_square(output)):
        return True
    return bool(torch.linalg.vector_norm(output, dtype=torch.float32).square().isfinite())


def rough_square(tensor: torch.Tensor) -> float:
    """Of its norm, in its own dtype: within 1 %, or infinite where that has no room for it. One operation."""
    flat = tensor.flatten()
    return torch.dot(flat, flat).item()


def grew_less(output: torch.Tensor, hidden: torch.Tensor, gain: float) -> bool:
    """Whether one row [1, H] surely grew less than that, see `gains`. Where it is close, the answer is no."""
    before = rough_square(hidden)
    return math.isfinite(before) and rough_square(output) < (_SURELY * gain) ** 2 * before


def gains(output: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """How many times as long each row [n, H] of an output is as the row that it was computed from: [n], float32."""
    norm = torch.linalg.vector_norm
    return norm(output, dim=-1, dtype=torch.float32) / norm(hidden, dim=-1, dtype=torch.float32)


def is_finite(tensor: torch.Tensor) -> bool:
    """No element is NaN or infinite.

    A sum is not finite if any of its terms is not. It takes 1.6 µs for a row of 4,096 elements, where `isfinite` takes
    30. The sum of finite elements may be too large for its dtype, so that `isfinite` has the last word.
    """
    total = tensor.sum().item()
    return total - total == 0 or bool(tensor.isfinite().all())

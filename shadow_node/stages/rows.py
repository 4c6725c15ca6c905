"""Hidden states between stages: in pieces, each as a message's tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from checkpoint.devices.transfer import to_host
from checkpoint.tensors import received_tensor, tensor_bytes
from wire.messages import LocalTensor, Tensor

PIECE_BYTES = 16 << 20
"""Of a hidden state in one message. The next piece is sent once this one was taken, so little waits in a queue."""


def pieces_of(hidden: torch.Tensor) -> list[Tensor]:
    """hidden [1, T, ...] -> [1, t, ...] each."""
    (here,) = to_host(hidden)
    rows = max(1, PIECE_BYTES * hidden.shape[1] // max(hidden.nbytes, 1))
    return [Tensor(*tensor_bytes(piece)) for piece in here.split(rows, dim=1)]


def joined(pieces: Sequence[Tensor | LocalTensor]) -> torch.Tensor:
    """The whole, in memory of its own: a product's last bit depends on the address of its rows, and those of a message
    lie anywhere."""
    tensors = [received_tensor(piece) for piece in pieces]
    return torch.cat(tensors, dim=1) if len(tensors) > 1 else tensors[0].clone()

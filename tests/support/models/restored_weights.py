"""Weights restored from their parts in each of the ways that an encoding has."""

from __future__ import annotations

import torch

from checkpoint.native.encoding import PIECE, Encoding, Shapes


def check_restored(
    encoding: Encoding, parts: dict[str, torch.Tensor], expected: torch.Tensor, threads: int, piece: int = PIECE
) -> None:
    """With torch, in pieces, and with the compiled routine, which threads share."""
    shape = tuple(expected.shape)
    assert encoding.fits({"up": ("float32", shape)}, shapes(parts))
    scratch = torch.empty(encoding.scratch_bytes(shape, piece), dtype=torch.uint8)
    found = torch.full_like(expected, 7.0)
    encoding.restore(found, parts, scratch, piece)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    together = torch.empty(encoding.scratch_for([shape], "cpu", threads), dtype=torch.uint8)
    found.fill_(7.0)
    encoding.restore_into({"up": found}, {f"up.{name}": part for name, part in parts.items()}, together)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert encoding.checked_routine(expected.dtype) is not None


def shapes(parts: dict[str, torch.Tensor]) -> Shapes:
    return {f"up.{name}": (str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in parts.items()}

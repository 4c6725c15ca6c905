"""MXFP4 beside a brute force over its numbers, and beside the package gguf."""

from __future__ import annotations

from itertools import pairwise

import gguf
import pytest
import torch
from gguf.quants import quantize

from checkpoint.native.encoding import CODES, SCALES
from checkpoint.native.mxfp4 import VALUES
from checkpoint.sharding.microscaling import in_mxfp4


def weights(dtype: torch.dtype) -> torch.Tensor:
    """Of many sizes. Some blocks are zero, some the halfway points between all numbers, some subnormal."""
    random = torch.Generator().manual_seed(0)
    found = torch.randn(64, 128, generator=random) * torch.randint(-20, 20, (64, 1), generator=random).exp2()
    halfway = torch.tensor([(low + high) / 2 for low, high in pairwise(VALUES)])
    found[0] = 0
    found[1] = torch.cat((halfway, -halfway, torch.tensor([7.0, 6.0]))).repeat(8)
    found[2] = found[1] * 2.0**-9
    found[3] *= 2.0 ** (-10 if dtype is torch.float16 else -126)
    most = torch.finfo(torch.float16).max if dtype is torch.float16 else torch.inf
    return found.clamp(-most, most).to(dtype)


def brute(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [rows, columns] in float64, and scales: of all numbers the nearest, of two as near the one whose code is
    even."""
    blocks = weight.double().view(-1, 32)
    largest = blocks.abs().amax(1, keepdim=True)
    exponents = torch.where(largest > 0, largest.log2().floor() - 2, -127).clamp(min=-127)
    numbers = torch.tensor(VALUES, dtype=torch.float64)
    errors = (numbers * exponents.exp2().unsqueeze(-1) - blocks.abs().unsqueeze(-1)).abs()
    near = errors == errors.amin(-1, keepdim=True)
    even = torch.tensor([code % 2 == 0 for code in range(8)])
    chosen = torch.where((near.sum(-1, keepdim=True) > 1), near & even, near).int().argmax(-1)
    found = numbers[chosen] * exponents.exp2() * torch.where(blocks < 0, -1.0, 1.0)
    return found.view(weight.shape), (exponents + 127).view(len(weight), -1).to(torch.uint8)


def restored(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """By the specification's table."""
    codes = torch.stack((parts[CODES] & 15, parts[CODES] >> 4), -1).flatten(-2)
    numbers = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.float64)
    return (numbers[codes.int()] * (parts[SCALES].double() - 127).exp2().unsqueeze(-1)).flatten(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_are_the_nearest_and_ties_go_to_the_even_code(dtype: torch.dtype) -> None:
    weight = weights(dtype)
    found, (expected, scales) = in_mxfp4(weight), brute(weight)
    assert torch.equal(found[SCALES], scales)
    assert torch.equal(restored(found), expected)


def test_the_package_gguf_differs_in_ties_alone() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    blocks = torch.from_numpy(quantize(weight.numpy(), gguf.GGMLQuantizationType.MXFP4)).view(64, 4, 17)
    found, held = in_mxfp4(weight), blocks[..., 1:]
    assert torch.equal(found[SCALES], blocks[..., 0])
    codes = torch.stack((found[CODES] & 15, found[CODES] >> 4), -1).flatten(-2)
    expected = torch.cat((held & 15, held >> 4), -1)
    zeros = (codes % 8 == 0) & (expected % 8 == 0)  # gguf has no -0
    assert torch.equal(codes[~zeros], expected[~zeros])

"""Every coder gives back every bit, and what follows for a load is what a load of two steps takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scripts.checkpoints.lossless import Codec, codecs, copy, exponent_entropy, four_bits, times_shorter

CODECS, MISSING = codecs()


def test_codecs_without_packages_are_there_and_the_others_are_there_or_named() -> None:
    names = [codec.name for codec in CODECS]
    assert names[:2] == [copy().name, four_bits().name]
    for package, name in (("zipnn", "zipnn"), ("lz4", "lz4, exponents"), ("zstandard", "zstd -1, exponents")):
        assert (name in names) != (package in MISSING)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_every_bit_pattern_of_bfloat16_comes_back(codec: Codec) -> None:
    """NaN, infinities, subnormals and both zeros are among them."""
    data = np.tile(np.arange(1 << 16, dtype=np.uint16), 5)[:300_000].view(np.uint8)
    held, nbytes = codec.compress(data)
    into = np.full_like(data, 255)
    codec.restore(held, into)
    assert nbytes > 0
    assert np.array_equal(into, data)


def test_normal_weights_take_three_quarters_with_four_bits_an_exponent() -> None:
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).mul(0.02).to(torch.bfloat16)
    data = values.view(torch.uint8).numpy()
    _, nbytes = four_bits().compress(data)
    assert 0.75 <= nbytes / len(data) < 0.752


def test_entropy_of_exponents_that_are_known() -> None:
    assert exponent_entropy(torch.ones(64, dtype=torch.bfloat16).view(torch.uint8).numpy()) == 0
    four = torch.tensor([1.0, 2.0, 4.0, -8.0] * 16, dtype=torch.bfloat16)
    assert exponent_entropy(four.view(torch.uint8).numpy()) == pytest.approx(2)


def test_a_load_takes_both_steps_or_the_slower_one() -> None:
    # 1 GB at 1 GB/s takes 1 s; two thirds of it 2/3 s, and restoring at 2 GB/s 1/2 s.
    assert times_shorter(2 / 3, 2e9, 1e9, overlapped=False) == pytest.approx(1 / (2 / 3 + 1 / 2))
    assert times_shorter(2 / 3, 2e9, 1e9, overlapped=True) == pytest.approx(3 / 2)
    assert times_shorter(2 / 3, 2e9, 4e9, overlapped=True) == pytest.approx(1 / 2)

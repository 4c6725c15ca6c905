"""How many bits a plan counts for the experts of a GGUF file: those that `odmoe shard` keeps, or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from checkpoint.formats.gguf_blocks import expert_bits, has_encoding
from checkpoint.formats.gguf_file import GgufTensor


def file_of(*layers: tuple[Kind, Kind, Kind]) -> Any:
    """Of each layer gate, up and down."""
    return SimpleNamespace(
        tensors={
            f"blk.{number}.ffn_{which}_exps.weight": GgufTensor(kind.value, (4, 256, 256), 0, 0)
            for number, kinds in enumerate(layers)
            for which, kind in zip(("gate", "up", "down"), kinds, strict=True)
        }
    )


PLAIN = (Kind.Q4_0, Kind.Q4_0, Kind.Q4_0)


@pytest.mark.parametrize(
    ("layers", "bits"),
    [
        ([PLAIN], 4.5),
        ([PLAIN, (Kind.Q8_0, Kind.Q8_0, Kind.Q8_0)], 8.5),
        ([(Kind.Q4_0, Kind.Q4_0, Kind.Q8_0)], (4.5 + 4.5 + 8.5) / 3),
        ([(Kind.Q4_0, Kind.Q4_0, Kind.F16)], (4.5 + 4.5 + 16) / 3),
        ([PLAIN, (Kind.BF16, Kind.BF16, Kind.BF16)], 16.0),
        ([(Kind.Q4_0, Kind.Q8_0, Kind.Q4_0)], 0.0),
        ([(Kind.Q2_K, Kind.Q2_K, Kind.IQ4_XS)], (2.625 + 2.625 + 4.3125) / 3),
        ([PLAIN, (Kind.IQ2_XS, Kind.IQ2_XS, Kind.IQ2_XS)], 0.0),
        ([(Kind.F16, Kind.F16, Kind.F16)], 0.0),
    ],
    ids=[
        *("alike", "layers differ", "down differs", "a float", "a layer of floats", "halves differ"),
        *("with tables", "IQ", "floats"),
    ],
)
def test_bits_of_what_is_kept(layers: list[tuple[Kind, Kind, Kind]], bits: float) -> None:
    assert expert_bits(file_of(*layers)) == pytest.approx(bits)


def test_floats_alone_have_nothing_to_keep() -> None:
    assert has_encoding(file_of(PLAIN))
    assert not has_encoding(file_of((Kind.F16, Kind.F16, Kind.F16)))

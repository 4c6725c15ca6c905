"""Weights of linear layers in 8 or 4 bits, in groups along their inputs.

8 bits: numbers from -127 to 127 times a scale, rounded to the nearest. 4 bits: numbers from 0 to 15 times a scale, plus
a minimum, both as half-quadratic quantisation finds them.
"""

from __future__ import annotations

from functools import partial

import torch

from checkpoint.encoded_dense import group_of
from checkpoint.native.encoding import CODES, SCALES
from checkpoint.native.integers import MINIMUMS, packed_rows
from checkpoint.native.threads import together
from checkpoint.sharding.half_quadratic import quantised

LEVELS = torch.bfloat16
"""Of scales and minimums: no weight is out of its range."""

_CHUNK = 1 << 18
"""Values that are refined together. Fixed, since the mean error of them all decides when to stop."""
_LARGEST_INT8 = 127
_LEAST_SCALE = 2.0**-120


def in_few_bits(weight: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    """The parts of some rows of a weight, [rows, columns] in floating point, for the encoding `GGML_INTEGERS`."""
    return _in_int8(weight) if bits == 8 else _in_int4(weight)


def _in_int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    groups = _groups(weight)
    largest = groups.abs().amax(-1)
    scales = _at_least(largest / _LARGEST_INT8)
    numbers = (groups / scales.float().unsqueeze(-1)).round_().clamp_(-_LARGEST_INT8, _LARGEST_INT8).add_(128)
    return {CODES: numbers.to(torch.uint8).view(weight.shape), SCALES: scales}


def _at_least(scales: torch.Tensor) -> torch.Tensor:
    """In `LEVELS`, rounded up, so that no group's largest weight is cut off."""
    scales = scales.clamp_(min=_LEAST_SCALE)
    found = scales.to(LEVELS)
    up = (found.view(torch.int16) + 1).view(LEVELS)
    return torch.where(found.float() < scales, up, found)


def _in_int4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    groups = _groups(weight)
    flat = groups.flatten(0, 1)
    scales, minimums = torch.empty(2, len(flat), 1)
    step = _CHUNK // flat.shape[1]

    def refine(first: int) -> None:
        _, scale, zero = quantised(flat[first : first + step], 4)
        scales[first : first + step], minimums[first : first + step] = scale, -zero * scale

    threads = torch.get_num_threads()
    places = range(0, len(flat), step)
    for number in range(0, len(places), threads):
        together([partial(refine, first) for first in places[number : number + threads]])
    kept, least = scales.clamp_(min=_LEAST_SCALE).to(LEVELS), minimums.to(LEVELS)
    numbers = ((flat - least.float()) / kept.float()).round_().clamp_(0, 15).to(torch.uint8)
    shape = groups.shape[:2]
    return {
        CODES: packed_rows(numbers.view(weight.shape), 4),
        SCALES: kept.view(shape),
        MINIMUMS: least.view(shape),
    }


def _groups(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    return weight.float().view(rows, -1, group_of(columns))

"""Runs forward passes that stop at linear layers only, as the main node's step does at each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from checkpoint import linear_batch
from checkpoint.coroutine import Coroutine
from checkpoint.linear_batch import LinearCall, meeting

T = TypeVar("T")


def run_together(passes: Sequence[Coroutine[T]], exact: bool = False) -> list[T]:
    """Run passes that stop at linear layers only, from their beginning to their end. Returns their results.

    `exact`: see `linear_batch.multiply`. Enter `torch.inference_mode()` around it. Raises what the first pass to fail
    raises; the others are given up.
    """
    waiting: dict[int, LinearCall] = {}

    def resume(number: int, value: torch.Tensor | None) -> None:
        stopped = passes[number].resume(value)
        if not passes[number].ended:
            waiting[number] = stopped

    for number in range(len(passes)):
        resume(number, None)
    while waiting:
        numbers = list(waiting)
        met = [numbers[index] for index in meeting(waiting.values())]
        for number, output in zip(
            met, linear_batch.multiply([waiting.pop(number) for number in met], exact), strict=True
        ):
            resume(number, output)
    return [one.result for one in passes]

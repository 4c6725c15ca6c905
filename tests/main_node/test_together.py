"""Several requests in one step: each answer is that of the request alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpoint.kernels import EXACT
from checkpoint.linear_batch import BatchLinear
from support.nodes.engine_world import nothing_left
from support.nodes.exact import WHOLE, answers_together, check_together

pytestmark = pytest.mark.timeout(180)
TOKENS = 8


@pytest.mark.parametrize(("shadow", "slots"), [("none", 1), ("none", 2), ("int8", 1), ("nf4", 2)])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_tokens_and_logits_are_those_alone(count: int, shadow: str, slots: int, embedded: Any, reference: Any) -> None:
    cluster = embedded(shadow=shadow, slots=slots, **WHOLE)
    expected = [reference("float32", number, TOKENS + number) for number in range(count)]
    check_together(cluster.main, expected)
    assert nothing_left(cluster.main.engine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_batched_dense_part_is_exact_where_it_says_so(dtype: str, embedded: Any, reference: Any) -> None:
    """In bfloat16 on CPUs with AMX every bit stays; elsewhere logits are equal up to rounding."""
    cluster = embedded(dtype=dtype, shadow="none", batch_dense=True, prefill_chunk=0, **WHOLE)
    layers = [module for module in cluster.main.model.modules() if isinstance(module, BatchLinear)]
    keeps_bits = all(EXACT.is_rowwise(layer.weight, layer.bias) for layer in layers)
    assert layers
    assert not (keeps_bits and dtype == "float32")
    expected = [reference(dtype, number, TOKENS) for number in range(3)]
    got = answers_together(cluster.main, [one.prompt for one in expected], [TOKENS] * 3)
    assert any(mine.report.requests_per_step > 1 for mine in got)
    for mine, alone in zip(got, expected, strict=True):
        assert mine.report.exact == (keeps_bits or mine.report.requests_per_step == 1)
        equal = [torch.equal(a, b) for a, b in zip(mine.logits, alone.logits, strict=True)]
        assert all(equal) or not keeps_bits
        if dtype == "float32":
            for logits, wanted in zip(mine.logits, alone.logits, strict=True):
                torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)

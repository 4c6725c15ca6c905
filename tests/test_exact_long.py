"""Exactness and recall over long answers: each setting with the dtype that it has not in tests/test_exact.py.

About a minute and a half of one core.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.nodes.exact import SETTINGS, WHOLE, check_bit_for_bit, check_split_prefill, check_together, mean_recall

TOKENS = 32
PROMPTS = (0, 4, 8)
CASES = [(name, ("bfloat16", "float32")[n % 2], PROMPTS[n % 3]) for n, name in enumerate(SETTINGS)]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("name", "dtype", "number"), CASES)
def test_tokens_and_logits_bit_for_bit(name: str, dtype: str, number: int, embedded: Any, reference: Any) -> None:
    check_bit_for_bit(embedded(dtype, **SETTINGS[name]), name, reference(dtype, number, TOKENS))


@pytest.mark.parametrize(
    ("together", "slots", "shadow"), [(3, 1, "int8"), (3, 1, "none"), (8, 2, "nf4"), (3, 2, "fp16")]
)
def test_requests_at_once_bit_for_bit(together: int, slots: int, shadow: str, embedded: Any, reference: Any) -> None:
    """Tokens and logits of each request alone."""
    cluster = embedded("bfloat16", shadow=shadow, slots=slots, **WHOLE)
    check_together(cluster.main, [reference("bfloat16", number, TOKENS) for number in range(together)])


@pytest.mark.parametrize(
    ("draft", "shadow", "slots", "together"),
    [
        *((1, "int8", 1, 3), (1, "none", 1, 1)),
        *((8, "int8", 1, 1), (8, "nf4", 2, 3), (8, "none", 1, 3)),
        *(("auto", "nf4", 2, 1), ("auto", "none", 1, 3)),
    ],
)
def test_drafts_bit_for_bit(draft: Any, shadow: str, slots: int, together: int, embedded: Any, reference: Any) -> None:
    source = "prompt" if shadow == "none" else "shadow"
    cluster = embedded(shadow=shadow, slots=slots, draft=draft, draft_from=source, **WHOLE)
    check_together(cluster.main, [reference("float32", number, TOKENS) for number in range(together)])


@pytest.mark.parametrize(("rows", "number"), [(1, 8), (7, 4), (32, 8)])
def test_split_prefill_keeps_the_tokens(rows: int, number: int, embedded: Any, reference: Any) -> None:
    """tests/test_exact.py has the first prompt."""
    check_split_prefill(embedded(mini_batch=rows, shadow="none"), reference("float32", number, 24))


@pytest.mark.parametrize(("scheme", "least"), [("fp16", 0.999), ("int8", 0.99), ("nf4", 0.94)])
def test_recall_aligned_and_never(scheme: str, least: float, embedded: Any, reference: Any) -> None:
    """Over five prompts x 24 tokens; without alignment a quantised shadow drifts away."""
    prompts, recalls = [reference("float32", number, 24).prompt for number in range(5)], {}
    for period in (1,) if scheme == "fp16" else (1, 0):
        recalls[period] = mean_recall(
            embedded(shadow=scheme, align_token=period, align_kv=period, departure="late"), prompts, 24
        )
    assert recalls[1] >= least
    if scheme != "fp16":
        assert recalls[0] < recalls[1] - 0.04

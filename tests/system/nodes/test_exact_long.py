"""Exactness and recall over long answers, every setting with every prompt. About 3 minutes on two idle cores."""

from __future__ import annotations

from typing import Any

import pytest

from support.nodes.exact import SETTINGS, WHOLE, check_bit_for_bit, check_split_prefill, check_together, mean_recall

TOKENS = 32
PROMPTS = (0, 4, 8)
pytestmark = pytest.mark.system


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_and_logits_bit_for_bit(name: str, dtype: str, embedded: Any, reference: Any) -> None:
    cluster = embedded(dtype, **SETTINGS[name])
    for number in PROMPTS:
        check_bit_for_bit(cluster, name, reference(dtype, number, TOKENS))


@pytest.mark.parametrize("shadow", ["int8", "nf4", "fp16", "none"])
@pytest.mark.parametrize(("together", "slots"), [(3, 1), (8, 2)])
def test_requests_at_once_bit_for_bit(
    together: int, slots: int, shadow: str, embedded: Any, reference: Any, gsm8k: list[str]
) -> None:
    """Tokens and logits of each request alone."""
    cluster = embedded("bfloat16", shadow=shadow, slots=slots, **WHOLE)
    expected = [reference("bfloat16", number % len(gsm8k), TOKENS) for number in range(together)]
    check_together(cluster.main, expected)


@pytest.mark.parametrize("draft", [1, 8, "auto"])
@pytest.mark.parametrize(("shadow", "slots"), [("int8", 1), ("nf4", 2), ("none", 1)])
@pytest.mark.parametrize("together", [1, 3])
def test_drafts_bit_for_bit(
    together: int, shadow: str, slots: int, draft: Any, embedded: Any, reference: Any, gsm8k: list[str]
) -> None:
    source = "prompt" if shadow == "none" else "shadow"
    cluster = embedded(shadow=shadow, slots=slots, draft=draft, draft_from=source, **WHOLE)
    expected = [reference("float32", number % len(gsm8k), TOKENS) for number in range(together)]
    check_together(cluster.main, expected)


@pytest.mark.parametrize("rows", [1, 7, 32])
def test_split_prefill_keeps_the_tokens(rows: int, embedded: Any, reference: Any) -> None:
    cluster = embedded(mini_batch=rows, shadow="none")
    for number in PROMPTS:
        check_split_prefill(cluster, reference("float32", number, 24))


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

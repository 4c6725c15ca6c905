"""Settings under which an answer must be Transformers', and what is compared."""

from __future__ import annotations

from typing import Any

import torch

WHOLE = {"mini_batch": 4096}
SETTINGS: dict[str, dict[str, Any]] = {
    "base": WHOLE,
    "slots 2": {"slots": 2, **WHOLE},
    "shadow none": {"shadow": "none", **WHOLE},
    "shadow nf4": {"shadow": "nf4", **WHOLE},
    "shadow fp16": {"shadow": "fp16", **WHOLE},
    "workers 1": {"workers": 1, **WHOLE},
    "workers 1, no shadow": {"workers": 1, "shadow": "none", **WHOLE},
    "workers 3, slots 2, memory": {"workers": 3, "slots": 2, "loader": "memory", **WHOLE},
    "workers 12, group 4": {"workers": 12, "group_size": 4, **WHOLE},
    "workers 5, group 1": {"workers": 5, "group_size": 1, "shadow": "fp16", **WHOLE},
    "periods 4": {"align_token": 4, "align_kv": 4, **WHOLE},
    "never aligned": {"align_token": 0, "align_kv": 0, **WHOLE},
    "token never, KV every 3": {"align_token": 0, "align_kv": 3, "shadow": "nf4", **WHOLE},
}


def answers(cluster: Any, prompt: list[int], count: int) -> tuple[Any, list[torch.Tensor]]:
    """The report of one answer, and the logits of each of its tokens."""
    logits: list[torch.Tensor] = []
    cluster.main.on_logits = logits.append
    *_, last = cluster.generate(prompt, count, ignore_eos=True)
    return last.report, logits


def check_bit_for_bit(cluster: Any, name: str, expected: Any) -> None:
    """Tokens and logits are those of `expected`, with no more experts held than there are slots by setting `name`."""
    report, logits = answers(cluster, expected.prompt, len(expected.tokens))
    assert report.token_ids == expected.tokens
    equal = [torch.equal(a, b) for a, b in zip(logits, expected.logits, strict=True)]
    assert equal == [True] * len(expected.tokens)
    assert max(report.resident_experts_max) <= SETTINGS[name].get("slots", 1)


def check_split_prefill(cluster: Any, expected: Any) -> None:
    """Mini-batches change the shapes of the products, so logits agree to rounding and tokens agree."""
    report, logits = answers(cluster, expected.prompt, len(expected.tokens))
    assert report.token_ids == expected.tokens
    for got, wanted in zip(logits, expected.logits, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def mean_recall(cluster: Any, prompts: list[list[int]], count: int) -> float:
    """Equation (3) over answers of `count` tokens, each of whose passes was predicted."""
    reports = [answers(cluster, prompt, count)[0] for prompt in prompts]
    assert all(len(report.recall_by_token) == count - 1 for report in reports)
    return sum(report.recall for report in reports) / len(reports)

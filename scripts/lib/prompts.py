"""Prompts of the experiments: GSM8K test problems, whole or cut to a length."""

from __future__ import annotations

import json
import random
from typing import Any

from scripts.lib.paths import DATA, GSM8K_PROMPTS

MEASURED = 20
"""Predictions are measured on the first so many problems: no predictor is trained on them."""


def problems() -> list[str]:
    """All 40 GSM8K test problems of scripts/data as prompts."""
    lines = (DATA / "gsm8k_test.jsonl").read_text().splitlines()
    return [f"Question: {json.loads(line)['question']}\nAnswer:" for line in lines]


def gsm8k_prompts(count: int) -> list[str]:
    """The first `count` GSM8K test prompts."""
    return json.loads(GSM8K_PROMPTS.read_text())[:count]


def prompts_of_length(tokenizer: Any, count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of exactly `tokens` token ids each, the tokenizer's special tokens at the beginning among them.

    GSM8K test problems in an order drawn by `seed`, each begun by another problem, gone on with the next ones where it
    is too short and cut where it is too long. Past the last problem they begin again, further on in the text.
    """
    texts = gsm8k_prompts(1 << 30)
    random.Random(seed).shuffle(texts)
    bare: list[list[int]] = [tokenizer(text + "\n", add_special_tokens=False)["input_ids"] for text in texts]
    whole: list[int] = tokenizer(texts[0])["input_ids"]
    special = set(tokenizer.all_special_ids)
    first = next((n for n, token in enumerate(whole) if token not in special), 0)
    joined = [token for one in bare for token in one]
    starts = [sum(map(len, bare[:n])) for n in range(len(bare))]
    found = []
    for number in range(count):
        start = starts[number % len(bare)] + 7 * (number // len(bare))
        need = tokens - first
        body = [joined[(start + n) % len(joined)] for n in range(need)]
        found.append((whole[:first] + body)[:tokens])
    return found

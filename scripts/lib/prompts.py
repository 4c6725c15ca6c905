"""Prompts of the experiments, all of them from scripts/data: nothing of the project was trained on any.

`odmoe train-predictor` learns from other prompts of the same domains (odmoe/training/domains.py).
tests/scripts/lib/test_prompts.py holds the two sides apart.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

from odmoe.training.domains import DOMAINS, read_domain
from scripts.lib.paths import DATA


def gsm8k_rows() -> list[dict[str, str]]:
    """The 40 GSM8K test problems of scripts/data, each with `question` and `answer`."""
    lines = (DATA / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def problems() -> list[str]:
    """All of them as prompts."""
    return [f"Question: {row['question'].strip()}\nAnswer:" for row in gsm8k_rows()]


def sonnets() -> str:
    """Five of Shakespeare's sonnets: text without prompts."""
    return (DATA / "sonnets.txt").read_text(encoding="utf-8")


def measured_prompts() -> dict[str, list[str]]:
    """Domain -> its prompts to measure on."""
    return {one: problems() if one == "problems" else read_domain(DATA / "prompts", one) for one in DOMAINS}


def mixed_prompts(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """`count` times (domain, prompt): one of each domain in turns, each domain's drawn by `seed`. Raises SystemExit
    if there are not so many."""
    draw = random.Random(seed)
    drawn = [[(name, text) for text in draw.sample(texts, len(texts))] for name, texts in measured_prompts().items()]
    found = list(itertools.chain.from_iterable(zip(*drawn, strict=False)))
    if len(found) < count:
        raise SystemExit(f"{count} prompts are wanted; there are {len(found)}")
    return found[:count]


def gsm8k_prompts(count: int) -> list[str]:
    """The first `count` GSM8K test prompts, 20 at most."""
    return problems()[: min(count, 20)]


def prompts_of_length(tokenizer: Any, count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of exactly `tokens` token ids each, the tokenizer's special tokens at the beginning among them.

    GSM8K test problems in an order drawn by `seed`, each begun by another problem, gone on with the next ones if it
    is too short and cut if it is too long. Past the last problem they begin again, further on in the text.
    """
    texts = gsm8k_prompts(20)
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

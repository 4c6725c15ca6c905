"""Answer quality that needs no judge: the tokens of Transformers, held-out text, and GSM8K's final answers."""

from __future__ import annotations

import re
from typing import Any

from odmoe.quality.tasks import final_answer
from scripts.lib import prompts
from scripts.lib.prompts import gsm8k_rows, sonnets


def problems(count: int) -> list[tuple[str, str]]:
    """(prompt, answer as GSM8K gives it) of the first `count` problems."""
    rows = gsm8k_rows()
    if count > len(rows):
        raise SystemExit(f"--problems is {count}; there are {len(rows)}")
    return list(zip(prompts.problems()[:count], [row["answer"] for row in rows[:count]], strict=True))


def answered(text: str, solution: str) -> bool:
    """Is the final answer of `text` the one of GSM8K's `solution`?"""
    found = final_answer(text)
    return found is not None and found == final_answer(solution)


def agreement(found: list[list[int]], expected: list[list[int]]) -> tuple[int, int]:
    """How many tokens are the same at the same place, and how many there are."""
    pairs = [pair for a, b in zip(found, expected, strict=True) for pair in zip(a, b, strict=True)]
    return sum(a == b for a, b in pairs), len(pairs)


def held_out(tokenizer: Any, tokens: int) -> list[int]:
    """Half of it GSM8K problems with solutions, from the end of the file; half of it sonnets."""
    begin: list[int] = tokenizer("")["input_ids"]
    solved = [
        f"Question: {row['question'].strip()}\nAnswer: {re.sub('<<.*?>>', '', row['answer']).strip()}\n"
        for row in reversed(gsm8k_rows())
    ]
    halves = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("".join(solved), sonnets())]
    half = (tokens - len(begin)) // 2
    short = [len(ids) for ids in halves if len(ids) < half]
    if short:
        raise SystemExit(f"--text-tokens is {tokens}; there are {2 * short[0]}")
    return begin + halves[0][:half] + halves[1][: tokens - len(begin) - half]

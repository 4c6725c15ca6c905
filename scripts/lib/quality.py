"""Answer quality that needs no judge: the tokens of Transformers, held-out text, and GSM8K's final answers.

Perplexity of a cluster is that of its decode passes. A main node keeps the logits of a pass's last token only, so each
window's first token is the prompt and every other one is forced: whatever the logits say, the text's own token comes
next. Attention, shadow, predictions, loads and experts are those of any answer.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import torch

from scripts.lib import prompts
from scripts.lib.prompts import gsm8k_rows, sonnets

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


def problems(count: int) -> list[tuple[str, str]]:
    """(prompt, answer as GSM8K gives it) of the first `count` problems."""
    rows = gsm8k_rows()
    if count > len(rows):
        raise SystemExit(f"--problems is {count}; there are {len(rows)}")
    return list(zip(prompts.problems()[:count], [row["answer"] for row in rows[:count]], strict=True))


def final_answer(text: str) -> Decimal | None:
    """The number after the first `####`; where there is none, the last number. None: no number at all."""
    _, marked, after = text.partition("####")
    numbers: list[str] = _NUMBER.findall(after.lstrip().split("\n")[0] if marked else text)
    if not numbers:
        return None
    return Decimal((numbers[0] if marked else numbers[-1]).replace(",", "").replace("$", ""))


def answered(text: str, solution: str) -> bool:
    """Is the final answer of `text` the one of GSM8K's `solution`?"""
    found = final_answer(text)
    return found is not None and found == final_answer(solution)


def until_end(tokens: list[int], ends: set[int]) -> list[int]:
    """An answer up to its first end of sequence."""
    return tokens[: next((n for n, token in enumerate(tokens) if token in ends), len(tokens))]


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


class Forced:
    """A chooser that always chooses the text's next token, and keeps the logits [V] that it was shown."""

    def __init__(self, text: list[int]) -> None:
        self.ignored: list[str] = []
        self.seed = None
        self.ends: frozenset[int] = frozenset()
        self.last_tokens = self.ends
        self.complete_at: int | None = None
        self.logits: list[torch.Tensor] = []
        self._text = text

    def choose(self, logits: torch.Tensor) -> int:
        self.logits.append(logits.clone())
        return self._text[len(self.logits) - 1]


def forced_logits(cluster: Any, window: list[int], given: int = 1) -> torch.Tensor:
    """[T - given, V] float32 from an embedded cluster's own passes over the window: its first `given` tokens are the
    prompt, taken in one pass as any prompt is, and each other token is a decode pass of its own. Row n says what
    follows token `given` - 1 + n."""
    answer = cluster.main.generate(window[:given], len(window) - given, ignore_eos=True)
    answer.request.chooser = forced = Forced(window[given:])
    for _ in answer:
        pass
    return torch.stack(forced.logits)

"""The kinds of text that token-wise predictors are trained on, and the prompts of each that come with the package.

Problems are from GSM8K and code is from HumanEval, both MIT, copyright (c) 2021 OpenAI: prompts/README.md.

Nothing is measured on these: experiments ask what scripts/lib/prompts.py has of the same domains.
tests/scripts/lib/test_prompts.py holds the two sides apart.
"""

from __future__ import annotations

import json
from pathlib import Path

DOMAINS = ("problems", "code", "speeches", "plays", "instructions")
FOLDER = Path(__file__).with_name("prompts")


def read_domain(folder: Path, domain: str) -> list[str]:
    """The prompts of a domain's file: one a line, as JSON strings, the format of `odmoe generate --prompts`."""
    lines = (folder / f"{domain}.txt").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def training_prompts() -> dict[str, list[str]]:
    """Domain -> its prompts."""
    return {domain: read_domain(FOLDER, domain) for domain in DOMAINS}

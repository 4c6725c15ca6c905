"""Prompts that come with the package: 20 problems of GSM8K's test set (Cobbe et al. 2021, MIT licence).

No experiment of the project measures predictions on them, so predictors may be trained on them.
"""

from __future__ import annotations

import json
from pathlib import Path

FILE = Path(__file__).with_suffix(".txt")
"""One prompt a line, as JSON strings: the format of `odmoe generate --prompts`."""


def sample_prompts() -> list[str]:
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]

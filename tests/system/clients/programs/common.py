"""What every client asks for, and how it says what it got."""

from __future__ import annotations

import json
import sys

URL = sys.argv[1]
MODEL = "demo-moe"
KEY = "a-key-of-the-clients"
QUESTION = "What is 19 and 23?"
DESCRIPTION = "Adds two integers."
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def add(a: int, b: int) -> str:
    """Adds two integers."""
    return str(a + b)


def tell(calls: list[dict], answer: str, pieces: int) -> None:
    """`calls`: arguments of each call of `add`. `pieces`: of the answer's text, as streamed."""
    print(json.dumps({"calls": calls, "answer": answer, "pieces": pieces}))

"""How much text one token can stand for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

MOST_COMPOSED = 4
"""Characters that Unicode's normal form makes one of."""
_KEEP = ("ByteLevel", "Metaspace", "Digits", "Split", "Punctuation")
"""Ways of splitting a text that drop nothing of it, unless they say so."""


@lru_cache(maxsize=4)
def most_characters(tokenizer: Any) -> int | None:
    """Most characters that one token stands for. None: there is no bound that is known, as where a word that is not in
    the vocabulary is one token, or a token takes the blanks beside it with it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    spec = json.loads(backend.to_str())
    vocabulary = spec["model"].get("vocab", ())
    pieces = {one if isinstance(one, str) else one[0] for one in vocabulary}
    added = spec["added_tokens"]
    splits, changes = list(_parts(spec["pre_tokenizer"])), list(_parts(spec["normalizer"]))
    bounded = (
        spec["model"]["type"] in ("BPE", "Unigram")
        and _spells(spec["model"], pieces, [*splits, *changes])
        and all(one["type"] in _KEEP and one.get("behavior") != "Removed" for one in splits)
        and all(_grows(one) or one["type"] == "NFC" for one in changes)
        and not any(one["lstrip"] or one["rstrip"] for one in added)
    )
    if not bounded:
        return None
    longest = max(map(len, pieces | {one["content"] for one in added}))
    return longest * (MOST_COMPOSED if any(one["type"] == "NFC" for one in changes) else 1)


def _parts(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The steps of a sequence of them."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
    for name in ("pretokenizers", "normalizers"):
        for one in step.get(name, ()):
            yield from _parts(one)


def _spells(model: dict[str, Any], pieces: set[str], steps: list[dict[str, Any]]) -> bool:
    """Whether what is not in the vocabulary is spelled in bytes, of which it has every one."""
    from tokenizers.pre_tokenizers import ByteLevel

    if any(step["type"] == "ByteLevel" for step in steps):
        return pieces.issuperset(ByteLevel.alphabet())
    return bool(model.get("byte_fallback")) and pieces.issuperset(f"<0x{byte:02X}>" for byte in range(256))


def _grows(change: dict[str, Any]) -> bool:
    """Whether a change of the text never makes it shorter."""
    if change["type"] == "Replace":
        return len(change["content"]) >= len(change["pattern"].get("String", change["content"] + "?"))
    return change["type"] in ("Prepend", "ByteLevel")

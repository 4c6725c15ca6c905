"""How much a JSON text holds, before it is parsed: a parser makes objects of a hundred bytes from two of the text, and
lets nothing else run meanwhile."""

from __future__ import annotations

from itertools import accumulate

from odmoe.serve.api_error import ApiError

MOST_VALUES = 1 << 20
"""Such as the token ids of prompts."""
MOST_TEXTS = 1 << 16
"""Texts, and names of fields."""
MOST_CONTAINERS = 1 << 16
"""Lists and objects."""
MOST_FRACTIONS = 1 << 16
"""Numbers with a point or an exponent, and the words true and false."""
MOST_DEPTH = 100
"""Of lists and objects within each other."""
MOST_OUTSIDE = 10 << 20
"""Bytes outside of texts."""
MOST_DIGITS = 1000
"""Of a number: to read one takes a time that grows with the square of its length."""
_DIGITS = b"0123456789"
_ONLY_DIGITS = bytes(one if one in _DIGITS else 32 for one in range(256))
"""Blanks for what is no digit."""
_BRACKETS = b"[]{}"
_OTHERS = bytes(set(range(256)) - set(_BRACKETS))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\x00\x00")


def check_json_size(body: bytes | bytearray) -> None:
    """Raises ApiError for a JSON text that holds more than is taken apart here. Of what is no JSON it may find
    anything."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in body else body
    quotes = plain.count(b'"')
    _check("texts and names", quotes // 2, MOST_TEXTS)
    outside = b"".join(plain.split(b'"')[::2])
    _check("bytes outside of texts", len(outside), MOST_OUTSIDE)
    containers = outside.count(b"[") + outside.count(b"{")
    _check("lists and objects", max(containers, outside.count(b"]") + outside.count(b"}")), MOST_CONTAINERS)
    _check("values", outside.count(b",") + containers + 1, MOST_VALUES)
    _check("fractions and words", sum(map(outside.count, (b".", b"e", b"E"))), MOST_FRACTIONS)
    if max(map(len, outside.translate(_ONLY_DIGITS).split()), default=0) > MOST_DIGITS:
        raise ApiError(400, f"the body's JSON has a number of more than {MOST_DIGITS} digits", code="invalid_json")
    steps = outside.translate(_STEPS, _OTHERS)
    _check("levels", max(accumulate((2 * step - 1 for step in steps), initial=0)), MOST_DEPTH)


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        text = f"the body's JSON has {count} {what}; allowed: {most}; ask for less at once"
        raise ApiError(400, text, code="invalid_json")

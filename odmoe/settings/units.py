"""Sizes and rates as people write them: 512MiB, 25GB/s, 2.5Gbit."""

from __future__ import annotations

import math
import re

from scheduler.errors import ConfigError

_NUMBER = r"(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([kKMmGgTt]i?)?"
_BYTES = re.compile(_NUMBER + r"(?:[Bb]|bytes)?", re.ASCII)
_RATE = re.compile(_NUMBER + r"(?:B|bytes)?(?:/s|ps)?", re.ASCII)  # b would be bits
_LINK = re.compile(_NUMBER + r"(?:b|bit|bits)?(?:/s|ps)?", re.ASCII)  # B would be bytes
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str, named: str) -> float:
    """`1GB` (10^9), `512MiB` (2^20 each), `704643072`. Raises ConfigError; `named`: the flag."""
    return _parse(_BYTES, text, named, "a size such as 1GB, 512MiB or 704643072 (bytes)")


def parse_rate(text: str, named: str) -> float:
    """Bytes a second: `25GB/s`, `3.5 GB/s`, `900MB`. Raises ConfigError."""
    return _parse(_RATE, text, named, "bytes a second such as 25GB/s or 500MB/s (B for bytes)")


def parse_link(text: str, named: str) -> float:
    """Bits a second: `1Gbit`, `2.5 Gbit/s`, `100Mbps`. Raises ConfigError."""
    return _parse(_LINK, text, named, "bits a second such as 1Gbit, 2.5Gbit/s or 100Mbps (b for bits)")


def _parse(form: re.Pattern[str], text: str, named: str, allowed: str) -> float:
    match = form.fullmatch(text.strip())
    if match:
        prefix = (match[2] or "").lower()
        base = 1024 if prefix.endswith("i") else 1000
        value = float(match[1]) * base ** (_POWERS[prefix[0]] if prefix else 0)
        if 0 < value < math.inf:
            return value
    raise ConfigError(f"{named} is {text!r}; allowed: {allowed}")

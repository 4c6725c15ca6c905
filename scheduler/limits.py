"""Numbers beyond which nothing is believed: a slip of the keyboard or a damaged file would fill the memory."""

from __future__ import annotations

MAX_EXPERTS = 1 << 16
"""Experts of a layer, layers, workers, slots."""
MAX_COUNT = 1 << 22
"""Tokens and rows."""

"""Text that comes in pieces, broken between words at the right edge of a terminal."""

from __future__ import annotations

import re

from rich.cells import cell_len

_PARTS = re.compile(r"\n|[^\S\n]+|\S+")


class WordWrap:
    """Where the cursor is, and the word at which it stands."""

    def __init__(self, width: int) -> None:
        """`width`: columns of the terminal."""
        self._width = max(20, width)
        self._column = 0
        self._word = ""

    def push(self, text: str) -> str:
        """What to write for the next piece. A word that does not fit is taken back and begun on a new line."""
        return "".join(map(self._part, _PARTS.findall(text)))

    def _part(self, part: str) -> str:
        if part == "\n":
            self._column, self._word = 0, ""
            return part
        if part.isspace():
            self._word = ""
            if self._column + len(part) >= self._width:
                self._column = 0
                return "\n"
            self._column += len(part)
            return part
        size, begun = cell_len(part), cell_len(self._word)
        if self._column + size < self._width or begun == self._column:  # fits, or is longer than a line
            self._word += part
            self._column = (self._column + size) % self._width
            return part
        word, self._word = self._word, self._word + part
        self._column = begun + size
        erased = f"\x1b[{begun}D\x1b[K" if begun else ""
        return f"{erased}\n{word}{part}"

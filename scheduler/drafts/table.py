"""The drafts of one request: which of them continue the answer as it is now."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.drafts.path import START, extend


class DraftTable:
    """The main model's tokens come in by `on_decoded`, the shadow's by `offer`, in any order.

    A draft that was made for another answer is kept apart by its path.
    """

    def __init__(self) -> None:
        self._count = 0  # tokens of the answer
        self._path = START
        self._drafts: dict[int, tuple[int, int]] = {}  # number of a token -> draft of it, path of the answer before

    def on_decoded(self, tokens: Iterable[int]) -> bool | None:
        """The next tokens of the answer. Whether the last of them had been drafted rightly; None: there was no draft of
        it."""
        right = None
        for token in tokens:
            draft, path = self._drafts.pop(self._count, (token, None))
            right = draft == token if path == self._path else None
            self._count += 1
            self._path = extend(self._path, (token,))
        return right

    def offer(self, step: int, token: int, path: int) -> None:
        """A draft of token `step` of the answer, see `wire.messages.Draft`. It replaces one of the same step."""
        if step >= self._count:
            self._drafts[step] = token, path

    def following(self) -> tuple[int, ...]:
        """The drafts after the answer's last token, up to the first that is missing."""
        found: list[int] = []
        step, path = self._count, self._path
        while step in self._drafts:
            token, before = self._drafts[step]
            if before != path:
                break
            found.append(token)
            step, path = step + 1, extend(path, (token,))
        return tuple(found)

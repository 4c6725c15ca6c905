"""Answers that are written beforehand, in place of a model's."""

from __future__ import annotations

from collections.abc import Iterator

from main_node.answer import Step


class Script:
    """An answer as a cluster gives it, of tokens that are written beforehand."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps

    def __iter__(self) -> Iterator[Step]:
        return self._steps

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        pass

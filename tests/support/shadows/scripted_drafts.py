"""Drafts of answers that are known, some of them wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from main_node.drafting import Drafting


class ScriptedDrafts(Drafting):
    """Each block gets the next 0 to 6 tokens of its request's answer, every second time with a wrong one among them.

    `answers`: prompt -> answer. `taken`: called with the number of drafts before each block.
    """

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], taken: Callable[[int], None] = lambda count: None
    ) -> None:
        super().__init__(None)
        self.on = True
        self.blocks = self.wrong = 0
        self._answers = answers
        self._taken = taken
        self._random = random.Random(3)
        self._gained: dict[int, tuple[Sequence[int], int]] = {}
        """Request -> its answer, and how much of it there is."""

    def on_opened(self, request: int, prompt: Sequence[int], room: int) -> None:
        self._gained[request] = self._answers[tuple(prompt)], 0

    def on_decoded(self, request: int, tokens: Sequence[int]) -> tuple[int, bool | None]:
        answer, count = self._gained[request]
        self._gained[request] = answer, count + len(tokens)
        return 0, None

    def take(self, request: int, most: int) -> tuple[int, ...]:
        answer, count = self._gained[request]
        drafts = list(answer[count : count + self._random.randint(0, 6)])[: most - 1]
        if drafts and self._random.random() < 0.5:
            at = self._random.randrange(len(drafts))
            drafts[at] = drafts[at] - 1 if drafts[at] else 1
            self.wrong += 1
        self.blocks += bool(drafts)
        self._taken(len(drafts))
        return tuple(drafts)

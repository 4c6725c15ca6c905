"""Drafts of answers that are known, some of them wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from main_node.drafting import Drafting, Drafts
from scheduler.drafts.length import Planned
from wire.messages import Draft


class ScriptedDrafts(Drafting):
    """Each block gets the next 0 to 6 tokens of its request's answer, every second time with a wrong one among them.

    `answers`: prompt -> answer. `taken`: called with the number of drafts before each block.
    """

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], taken: Callable[[int], None] = lambda count: None
    ) -> None:
        super().__init__(None)
        self.blocks = self.wrong = 0
        self.taken = taken
        self.random = random.Random(3)
        self._answers = answers

    def begin(self, prompt: Sequence[int], room: int, check_wanted: Callable[[], None]) -> Drafts:
        return _Scripted(self, self._answers[tuple(prompt)])


class _Scripted(Drafts):
    """Of one request."""

    plan = Planned()
    nbytes = 0

    def __init__(self, script: ScriptedDrafts, answer: Sequence[int]) -> None:
        self._script, self._answer = script, answer
        self._count = 0
        """Tokens of the answer so far."""

    def offer(self, draft: Draft) -> None:
        pass

    def on_decoded(self, tokens: Sequence[int]) -> tuple[int, bool | None]:
        self._count += len(tokens)
        return 0, None

    def take(self, most: int) -> tuple[int, ...]:
        script = self._script
        drafts = list(self._answer[self._count : self._count + script.random.randint(0, 6)])[: most - 1]
        if drafts and script.random.random() < 0.5:
            at = script.random.randrange(len(drafts))
            drafts[at] = drafts[at] - 1 if drafts[at] else 1
            script.wrong += 1
        script.blocks += bool(drafts)
        script.taken(len(drafts))
        return tuple(drafts)

    def on_verified(self, gained: int) -> None:
        pass

"""The tokens that the passes of a drafting shadow read: the main model's if they have come, else the shadow's own.

After another token its own tokens stay others, until the main model's comes.
"""

from __future__ import annotations

from scheduler.drafts.path import START, extend
from scheduler.simulation.drafts import RIGHT, WRONG
from scheduler.simulation.workload import Workload


class OwnTokens:
    """Of one request. Passes before `first` have read the main model's tokens."""

    def __init__(self, workload: Workload, first: int) -> None:
        self._workload = workload
        self._read = {first - 1: RIGHT}
        self._paths = {first - 1: extend(START, [RIGHT] * first)}
        self._told: set[int] = set()
        self._sent: dict[int, tuple[int, int]] = {}

    def on_told(self, steps: range) -> None:
        """The main model's tokens for these passes have come."""
        self._told.update(steps)

    def back(self, step: int) -> None:
        """Pass `step` and those after it will be run again."""
        self._read = {one: token for one, token in self._read.items() if one < step}

    def right(self, step: int) -> bool:
        """Whether a pass reads, or has read, the main model's token."""
        if step not in self._read:
            right = step in self._told or self._own(step) == RIGHT
            self._read[step] = RIGHT if right else WRONG
            self._paths[step] = extend(self._paths[step - 1], [self._read[step]])
        return self._read[step] == RIGHT

    def draft(self, step: int) -> tuple[int, int] | None:
        """Pass `step` has ended: its own token for the next one, and the path of the answer before it. None: this was
        sent before."""
        self.right(step)
        draft = self._own(step + 1), self._paths[step]
        if self._sent.get(step + 1) == draft:
            return None
        self._sent[step + 1] = draft
        return draft

    def forget(self, step: int) -> None:
        """Passes before `step` - 1 are not asked about any more."""
        for of in (self._read, self._paths, self._sent):
            for past in [one for one in of if one < step - 1]:
                del of[past]
        self._told = {one for one in self._told if one >= step - 1}

    def _own(self, step: int) -> int:
        return RIGHT if self.right(step - 1) and self._workload.same_token(step) else WRONG

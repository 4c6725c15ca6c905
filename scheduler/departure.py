"""Decides which pass the shadow runs next, and when it repeats one. The simulated shadow uses it too.

Late (OD-MoE section 3.2): a pass waits for its alignment.

At once: a pass starts without waiting, from the shadow's own token and KV rows. When its alignment comes later, there
are three cases:

- The token differs: the shadow goes back to before that pass, and reads the main model's token.
- The token is the same, with KV rows: a pass in flight takes them over between two layers. Once it has ended, it is
  repeated with them from its first layer, as is a pass that had ended before. Equal predictions stand. The repetition
  is given up when the main model announces the next pass, which is urgent.
- The token is the same, without KV rows: the pass stands.

Drafting, at either departure: the shadow runs as many passes ahead as the main model asks for. A block is aligned once,
after it. KV rows are taken over, in flight or at rest, and no pass is repeated for them, since drafts must come soon.
For states it goes back, though: they are of one position only. An alignment that asks for no more drafts is as any
other, and the passes that are ahead by then stand or are repeated as above.
"""

from __future__ import annotations

from enum import Enum, auto

from scheduler.alignment import Alignment

LOOKAHEAD = 2
"""Passes by which a shadow may be ahead of the main model."""


class Rewind(Enum):
    """What an alignment changes."""

    NONE = auto()
    TAKE_OVER = auto()
    """The KV rows are taken over: by the pass in flight, or, when drafting, by a cache that is ahead."""
    BACK = auto()
    """The pass in flight ends. The cache goes back to before pass `step`, which is next."""


class ShadowSchedule:
    """The passes of one request. Decode passes are numbered from 0; `passes` is their number."""

    def __init__(self, alignment: Alignment, departure: str, lookahead: int, first_step: int, passes: int) -> None:
        self.step = first_step
        """The next pass, or the one in flight."""
        self.announced = -1
        """The last pass that the main model has announced."""
        self.drafts = 0
        """Passes after that one that the shadow may run to draft tokens; 0: it drafts none."""
        self.running = False
        """Pass `step` is in flight."""
        self.again = False
        """Pass `step` is a repetition, with the main model's KV rows."""
        self.alignment = alignment
        self._departure = departure
        self._lookahead = lookahead
        self._passes = passes
        self._rows_arrived = False
        """KV rows came while pass `step` was in flight."""
        self.last = False
        """The repetition repeats the last pass that had begun, so that it can be given up."""

    def may_start(self) -> bool:
        """May pass `step` begin?"""
        if self.running or self.step >= self._passes:
            return False
        if self.drafts and 0 <= self.announced and self.step <= self.announced + self.drafts:
            return True
        return self.alignment.may_start(self.step, self.announced, self._lookahead, self._departure)

    @property
    def is_ahead(self) -> bool:
        """Pass `step` begins ahead of what may send the shadow back to it."""
        return self.step > self.announced and self.alignment.ever

    @property
    def urgent(self) -> bool:
        """The main model needs pass `step` now."""
        return self.step <= self.announced

    def start(self) -> None:
        """Pass `step` begins."""
        self.running, self._rows_arrived = True, False

    def gives_up(self, step: int) -> bool:
        """Whether a repetition is given up because pass `step` is announced. If so, its first run stands."""
        if not (self.running and self.again and self.last and step > self.step):
            return False
        self.running, self.again = False, False
        self.step += 1
        return True

    def on_aligned(
        self,
        step: int,
        other_token: bool,
        rows: bool,
        states: bool = False,
        drafts: int = 0,
        first_other: int | None = None,
    ) -> Rewind:
        """The alignment of pass `step` has come. `other_token`: the pass has read another token than the main model's.
        `rows`: there are KV rows. `states`: with states, which a pass in flight cannot take over. `drafts`: see the
        attribute. `first_other`: after a block, the first pass that has read another token, if that is not `step`."""
        if step >= self.announced:
            self.announced, self.drafts = step, drafts
        if first_other is None and other_token:
            first_other = step
        if first_other is not None and self.has_begun(first_other):
            return self._back(first_other, again=False)
        if not rows or not self.has_begun(step):
            return Rewind.NONE
        if states and step == self.step:
            return self._back(step, again=False)
        if self.drafts and not states:
            return Rewind.TAKE_OVER
        if step == self.step:
            self._rows_arrived = True
            return Rewind.TAKE_OVER
        return self._back(step, again=True)

    def has_begun(self, step: int) -> bool:
        """Has pass `step` begun, or ended?"""
        return step < self.step or (step == self.step and self.running)

    def on_ended(self) -> Rewind:
        """Pass `step` has ended. BACK: it is to be repeated."""
        if self._rows_arrived and self.announced == self.step:
            return self._back(self.step, again=True)
        self.running, self.again = False, False
        self.step += 1
        return Rewind.NONE

    def _back(self, step: int, again: bool) -> Rewind:
        begun = self.step + self.running
        self.last = begun == step + 1
        self.step, self.running, self.again = step, False, again
        return Rewind.BACK

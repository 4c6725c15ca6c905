"""One request that the shadow follows: its cache, its tokens, and the way back to an earlier pass."""

from __future__ import annotations

import math
from typing import Any

from checkpoint.devices.streams import borrow
from checkpoint.prefix_cache import PrefixCache
from checkpoint.tensors import received_tensor
from scheduler.alignment import AT_ONCE, LATE, Alignment
from scheduler.departure import Rewind, ShadowSchedule
from scheduler.errors import ProtocolError
from shadow_node.cache import Mark, RequestCache, request_cache
from shadow_node.prompt_reading import PromptReading
from shadow_node.tokens import Tokens
from wire.credit import message_bytes
from wire.messages import Align, OpenRequest

MARKED_BYTES = 1 << 30
"""Of the copies that the ways back of a request need: with more, it drafts no further. A long window or a state is
copied for every pass ahead."""


class Followed:
    """A request. All but `closed` belongs to the passes' thread."""

    def __init__(self, opened: OpenRequest, cache: Any, kept: PrefixCache | None = None) -> None:
        policy = Alignment(opened.align_token, opened.align_kv)
        self.number = opened.request
        self.prompt = list(opened.prompt)
        self.prompt_tokens = len(opened.prompt) - opened.first_step
        """Tokens before decode pass 0."""
        self.departure = LATE if opened.late else AT_ONCE
        self.course = ShadowSchedule(
            policy, self.departure, opened.lookahead, opened.first_step, opened.max_new_tokens - 1
        )
        self.steps = opened.max_new_tokens
        """Its decode passes are fewer."""
        self.reading = PromptReading(self.prompt, cache, kept)
        self.prefilled = False
        self.closed = False
        """It has ended, or its stream. Set by any thread."""
        self.broken = False
        """Its last pass has failed; it goes on with the next alignment."""
        self.announced_at = -math.inf
        """When the last pass was announced."""
        self.idle_at = -1
        """The last pass after whose alignment the shadow has said that it waits for the next."""
        self.tokens = Tokens(opened.request, self.prompt[self.prompt_tokens :])
        self._parts: dict[int, list[Align]] = {}
        """Decode pass -> its alignment, as far as it has come and may still be needed."""
        self.aligned_bytes = 0
        """Of `_parts` and `_taken_over`. May be read from any thread."""
        self._marks: dict[int, Mark] = {}
        """Decode pass that began ahead of its alignment -> the cache before it."""
        self._taken_over: list[tuple[int, int, list[Align]]] = []
        """Decode pass, last mark at the time, and KV rows that were taken over while the cache was ahead: windows in
        the marks after that pass are without them."""
        self._first_run: Mark | None = None
        """The cache after the pass that is being repeated."""
        self._sent: dict[int, dict[int, set[int]]] = {}
        """Decode pass -> layer -> the experts that were predicted last."""

    @property
    def cache(self) -> Any:
        """Of the tokens that it has read: what `new_cache` of the model returned, or a kept one."""
        return self.reading.cache

    @property
    def kv(self) -> RequestCache:
        """That cache, whether all of it is in this process or not."""
        return request_cache(self.reading.cache)

    def end(self) -> None:
        """It is closed, and no pass of it goes on: let go of what is kept for it."""
        self.reading.end()
        self.kv.close()

    # --- alignments ---------------------------------------------------------------------------------------------

    def receive(self, message: Align) -> Rewind:
        """A part of an alignment has come. `Rewind.BACK`: the pass in flight is to be dropped, and the cache is where
        pass `course.step` begins. Raises ProtocolError if the alignment does not fit the cache."""
        step, course = message.step, self.course
        if (message.token is not None or message.kv) and self._counts(step):
            self._parts.setdefault(step, []).append(message)
            self.aligned_bytes += message_bytes(message)
        if message.more:
            return Rewind.NONE
        self.broken = False
        gave_up = course.gives_up(step)
        if gave_up and self._first_run is not None:  # a repetition: the first run stands
            self.kv.go_to(self._first_run)
            self._first_run = None
        parts = [part.kv for part in self._parts.get(step, []) if part.kv]
        states = any(self.kv.has_states(tensors) for tensors in parts)
        in_blocks = bool(course.drafts or message.drafts)
        other = self._take_tokens(message)
        turn = course.on_aligned(step, other is not None, bool(parts), states, message.drafts, other)
        self.tokens.drafting |= message.drafts > 0
        if turn == Rewind.BACK:
            self._go_back()
            if in_blocks:  # the main model has used what was predicted for a block, its refused rows' too
                self._sent = {before: sent for before, sent in self._sent.items() if before < course.step}
        elif turn == Rewind.TAKE_OVER:
            self._take_over(step)
        self._forget()
        return Rewind.BACK if gave_up else turn

    def _counts(self, step: int) -> bool:
        """Whether the shadow may still go to pass `step`, or back to it."""
        return step in self._marks or not self.course.has_begun(step)

    def _take_tokens(self, message: Align) -> int | None:
        """Takes the main model's tokens. Returns the first pass that has read another one."""
        if message.token is None:
            return None
        tokens = (*message.before, message.token)
        other = None
        for step, token in enumerate(tokens, message.step - len(message.before)):
            if self._counts(step):
                self.tokens.on_told(step, token)
                if other is None and self.course.has_begun(step) and self.tokens.differ(step, token):
                    other = step
        return other

    def _go_back(self) -> None:
        """The cache goes back to before pass `course.step`."""
        step = self.course.step
        self._first_run = self.kv.mark(rows=True) if self.course.again and self.course.last else None
        self.kv.go_to(self._marks.pop(step))
        self._marks = {before: mark for before, mark in self._marks.items() if before < step}
        for aligned, _, parts in self._taken_over:
            if aligned < step:
                self._put(parts, aligned, self.kv.take_over)

    def _take_over(self, step: int) -> None:
        """The main model's KV rows up to pass `step`, which has begun."""
        parts = self._parts[step]
        self._put(parts, step, self.kv.take_over)
        last = max(self._marks, default=step)
        if last > step:
            self._taken_over.append((step, last, self._parts.pop(step)))

    def _put(self, parts: list[Align], step: int, put: Any) -> None:
        """Replace KV rows by the main model's."""
        end = self.prompt_tokens + step
        at = next((part.kv_start for part in parts if part.kv), end)
        for part in parts:
            if part.kv:
                at = self._put_part(part, at, put)
        if at != end:
            raise ProtocolError(f"alignment for decode pass {step} ends at position {at}, not {end}")

    def _put_part(self, part: Align, start: int, put: Any) -> int:
        """Write a part's rows. Returns the position after them. Raises ProtocolError, with nothing written, if they do
        not fit."""
        if part.kv_start != start:
            raise ProtocolError(f"alignment has KV rows from position {part.kv_start}; {start} comes next")
        tensors = [received_tensor(sent) for sent in part.kv]
        borrow(tensors)
        at: int = put(start, tensors)
        return at

    def _taken_parts(self, step: int) -> list[Align]:
        parts = self._parts.pop(step, [])
        self._uncount(parts)
        return parts

    def _uncount(self, parts: list[Align]) -> None:
        self.aligned_bytes -= sum(map(message_bytes, parts))

    def _forget(self) -> None:
        """Drop what no way back needs any more."""
        step, announced = self.course.step, self.course.announced
        self.tokens.forget(min(step, announced))
        for past in [one for one in self._sent if one < min(step, announced)]:
            del self._sent[past]
        for stands in [one for one in self._marks.keys() | self._parts.keys() if one <= announced and one < step]:
            self._marks.pop(stands, None)
            self._taken_parts(stands)
        for over in self._taken_over.copy():
            if not any(over[0] < marked <= over[1] for marked in self._marks):
                self._taken_over.remove(over)
                self._uncount(over[2])

    # --- passes -------------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Of the next pass, or of the one in flight."""
        return self.prompt_tokens + self.course.step

    def may_start(self) -> bool:
        """Whether a decode pass may begin."""
        parts = self._parts.get(self.course.step)
        whole = not parts or not parts[-1].more
        if not whole or not self.prefilled or self.closed or self.broken or not self.course.may_start():
            return False
        return not self.course.drafts or self.course.urgent or self._marked_bytes < MARKED_BYTES

    def start(self) -> tuple[int, bool]:
        """The next pass begins. Returns its token, and whether it was aligned. Raises ProtocolError."""
        course = self.course
        step = course.step
        parts = self._taken_parts(step)
        self._put(parts, step, self.kv.put)
        if course.is_ahead:
            self._marks[step] = self.kv.mark()
        course.start()
        return self.tokens.read(step), bool(parts)

    def on_prompt_read(self, token: int) -> None:
        """A pass of `reading` has ended with its own next token."""
        self.reading.on_read(len(self.reading.next_tokens()))
        if self.reading.is_complete:
            self.prefilled = True
            self.tokens.first(self.course.step, token)

    def on_pass_ended(self, token: int) -> None:
        """The pass in flight has ended with its own next token."""
        course = self.course
        self.tokens.on_pass_ended(course.step, token)
        if course.on_ended() == Rewind.BACK:
            self._go_back()
        else:
            self._first_run = None
        self._forget()

    def news(self, layer: int, experts: list[int]) -> bool:
        """Whether a prediction of the pass in flight differs from what was predicted for that layer before."""
        before = self._sent.setdefault(self.course.step, {})
        now = set(experts)
        if before.get(layer) == now:
            return False
        before[layer] = now
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of its cache and marks in this process."""
        return self.kv.nbytes + self._marked_bytes

    @property
    def _marked_bytes(self) -> int:
        kept = [*self._marks.values(), *([self._first_run] if self._first_run else [])]
        return sum(mark.nbytes for mark in kept)

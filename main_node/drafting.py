"""Drafts of the next tokens: where they come from, how many a block verifies, and what became of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from checkpoint.formats.unreadable import first_line
from checkpoint.mtp_head import MtpHead
from main_node.drafter import Drafter
from main_node.mtp_drafts import MtpDrafts
from scheduler.drafts.length import MOST_DRAFTS, DraftLength, DraftLengths, Planned
from scheduler.drafts.table import DraftTable
from wire import runtime
from wire.messages import Draft

SHADOW, PROMPT, MTP = "shadow", "prompt", "mtp"
NGRAM = 3
"""Tokens at the answer's end that drafts from the prompt begin with, at most."""

_UNDRAFTED = 2
"""Tokens of an answer that no draft gives: the prompt's pass gives the first, and the next pass one beside drafts."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftSource:
    """How drafts come about. `draft`: how many a block verifies, see `DraftLengths`. `late`: the shadow departs late.
    `origin`: the `shadow`, the `prompt` and the answer so far, by Transformers' prompt lookup, or the model's `mtp`
    head."""

    draft: int | str
    late: bool = False
    origin: str = SHADOW


class _ShadowDrafts(Drafter):
    """What the shadow has sent. Its messages come on another thread than the answer's."""

    def __init__(self) -> None:
        self._table = DraftTable()
        self._lock = runtime.Lock()

    def on_decoded(self, tokens: Sequence[int]) -> bool | None:
        with self._lock:
            return self._table.on_decoded(tokens)

    def offer(self, draft: Draft) -> None:
        with self._lock:
            self._table.offer(draft.step, draft.token, draft.path)

    def following(self, most: int) -> tuple[int, ...]:
        with self._lock:
            return self._table.following()[:most]


class _PromptDrafts(Drafter):
    """The tokens that followed when the last few occurred before."""

    def __init__(self, prompt: Sequence[int], room: int) -> None:
        self._tokens = torch.zeros(1, len(prompt) + room, dtype=torch.long)
        self._tokens[0, : len(prompt)] = torch.tensor(prompt)
        self._count = len(prompt)
        self._last: tuple[int, ...] = ()

    def on_decoded(self, tokens: Sequence[int]) -> bool | None:
        drafts, self._last = self._last[: len(tokens)], ()
        self._tokens[0, self._count : self._count + len(tokens)] = torch.tensor(tokens)
        self._count += len(tokens)
        if len(drafts) < len(tokens) or drafts[:-1] != tuple(tokens[:-1]):
            return None
        return drafts[-1] == tokens[-1]

    def following(self, most: int) -> tuple[int, ...]:
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        lookup = PromptLookupCandidateGenerator(
            num_output_tokens=most, max_matching_ngram_size=NGRAM, max_length=self._count + most + 1
        )
        found, _ = lookup.get_candidates(self._tokens[:, : self._count])
        self._last = tuple(found[0, self._count :].tolist())
        return self._last


class Drafts:
    """Of one request. Thread-safe. `lengths_lock`: of `Drafting`, since requests share what their lengths depend on."""

    def __init__(self, drafter: Drafter, length: DraftLength, lengths_lock: runtime.Lock) -> None:
        self._drafter, self._length, self._lock = drafter, length, lengths_lock
        self._rows = 1
        """Of the block under way."""

    @property
    def plan(self) -> Planned:
        """See `DraftLength`. With the lock held."""
        return self._length.plan

    @property
    def nbytes(self) -> int:
        """See `Drafter`."""
        return self._drafter.nbytes

    def on_read(self, position: int, states: Sequence[torch.Tensor], gained: tuple[int, ...]) -> None:
        """See `Drafter`."""
        self._drafter.on_read(position, states, gained)

    def offer(self, draft: Draft) -> None:
        """The shadow has drafted a token."""
        self._drafter.offer(draft)

    def on_decoded(self, tokens: Sequence[int]) -> tuple[int, bool | None]:
        """The answer has gained these tokens. Returns how far the shadow is to draft, and whether the last token had
        been drafted rightly, see `TokenDecoded`."""
        with self._lock:
            right, rows, self._rows = self._drafter.on_decoded(tokens), self._rows, 1
            if right is not None and len(tokens) == rows:  # it was in no block
                self._length.on_foretold(right)
            wanted = self._length.drafts()
        self._drafter.on_wanted(wanted)
        return wanted, right

    def take(self, most: int) -> tuple[int, ...]:
        """Drafts for the next block, which may have `most` rows."""
        found = self._drafter.following(MOST_DRAFTS)  # outside of the lock: a lookup in a long prompt takes its time
        with self._lock:
            self._rows = self._length.rows(len(found), most)
        return found[: self._rows - 1]

    def on_verified(self, gained: int) -> None:
        """A block has given so many tokens. Within its step."""
        with self._lock:
            self._length.on_verified(self._rows, gained)


class Draftable(Protocol):
    """A request that may have drafts."""

    drafts: Drafts | None


class Drafting:
    """Of a main node: makes the drafts of each request. `source`: None where nothing is drafted. Raises ConfigError."""

    def __init__(
        self, source: DraftSource | None, experts: int = 1, top_k: int = 1, head: MtpHead | None = None
    ) -> None:
        """`experts`, `top_k`: of a layer. `head`: where drafts come from it."""
        self._is_on, self._has_failed = source is not None, False
        self._origin, self._head = source.origin if source else SHADOW, head
        draft, late = (source.draft, source.late or head is not None) if source else (0, False)
        self._lengths = DraftLengths(draft, late, experts, top_k)
        self._lock = runtime.Lock()

    def begin(self, prompt: Sequence[int], room: int, check_wanted: Callable[[], None]) -> Drafts | None:
        """Of a new request; None where nothing is drafted. `room`: the most tokens of the answer. `check_wanted`:
        raises where nobody wants it any more."""
        if not self._is_on or (self._head is not None and room <= _UNDRAFTED):
            return None
        length = self._lengths.make_length()
        return Drafts(self._drafter(prompt, room, length, check_wanted), length, self._lock)

    def _drafter(
        self, prompt: Sequence[int], room: int, length: DraftLength, check_wanted: Callable[[], None]
    ) -> Drafter:
        if self._head is not None:
            with self._lock:
                wanted = length.drafts()
            return MtpDrafts(self._head, prompt, room, wanted, check_wanted)
        return _PromptDrafts(prompt, room) if self._origin == PROMPT else _ShadowDrafts()

    def on_read(
        self, request: Draftable, position: int, states: Sequence[torch.Tensor], gained: tuple[int, ...]
    ) -> None:
        """See `Drafter`. A head that fails, such as by too little memory, ends the request's drafts, not its answer."""
        drafts = request.drafts
        if drafts is None or self._head is None:
            return
        try:
            drafts.on_read(position, states, gained)
        except RuntimeError as error:
            request.drafts = None
            if not self._has_failed:
                _log.warning("--draft-from mtp: the head failed, the answer goes on without it: %s", first_line(error))
            self._has_failed = True

    def on_step_ended(self, requests: Iterable[Draftable], rows: int, seconds: float, decoding: bool) -> None:
        """A step of these requests has ended; `rows`: of all its passes. `decoding`: it read no prompt."""
        if self._is_on:
            with self._lock:
                plans = [one.drafts.plan for one in requests if one.drafts is not None]
                self._lengths.on_step_ended(plans, rows, seconds, decoding)

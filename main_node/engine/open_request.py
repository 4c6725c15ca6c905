"""What the engine knows of a request, from its opening until it is closed."""

from __future__ import annotations

from dataclasses import dataclass, field

from main_node.checks.audits import Case
from main_node.checks.suspects import Source
from main_node.engine.sequence import Sequence
from main_node.reach import Window
from scheduler.errors import RequestFailedError


@dataclass(slots=True)
class OpenRequest:
    """Changed with the engine's lock held, except `window`; see `Reach`."""

    sequence: Sequence | None
    """None once the answer has its last token: what it holds is freed then, though predictions may still come."""
    window: Window
    """What the shadow may predict."""
    answer_tokens: int = 0
    """Tokens of the answer, once it has its last one."""
    failure: tuple[type[RequestFailedError], str] | None = None
    """How and why it failed."""
    is_shared: bool = False
    """Another request was opened beside it."""
    sources: set[Source] = field(default_factory=set)
    """Workers with an output in the answer."""
    is_doubted: bool = False
    """The answer may have a wrong output."""
    largest_gains: dict[Source, tuple[float, Case]] = field(default_factory=dict)
    """Of each worker the row of its outputs that grew most, and how many times."""

    @property
    def tokens(self) -> int:
        """Tokens of the answer so far."""
        return self.answer_tokens if self.sequence is None else len(self.sequence.tokens)

    def end_answer(self) -> None:
        """The answer has its last token, or ends without one."""
        self.answer_tokens, self.sequence = self.tokens, None

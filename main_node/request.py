"""One request, as the token loop works on it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from main_node.choosing.chooser import Chooser
from main_node.choosing.prompt_scores import PromptScores
from main_node.engine.sequence import Sequence
from main_node.logprobs import TokenLogprobs
from scheduler.errors import RequestCancelledError


@dataclass(slots=True)
class Request:
    """What the token loop works on."""

    number: int
    sequence: Sequence
    chooser: Chooser
    stopped: Callable[[int], bool] | None
    """Takes every token in order; True once the answer has reached a stop text."""
    logprobs: deque[TokenLogprobs] = field(default_factory=deque)
    """Of tokens that were chosen and not shown yet, in their order; empty where nobody wants them."""
    prompt_scores: PromptScores | None = None
    """Where log-probabilities of the prompt are wanted."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    prefill_passes: int = 0
    """Passes that have read the prompt."""
    read_again: int = 0
    """Times that all tokens so far were read again, as the model's own generation does."""
    chunked: bool = False
    """Some of its tokens were read in chunks."""
    steps: int = 0
    """Steps that ran a pass of it."""
    passes: int = 0
    """Passes in these steps, those of other requests too."""
    drafted: int = 0
    """Drafts that its passes have verified."""
    accepted: int = 0
    """Of those, the ones that were right."""
    rounded: bool = False
    """Some of its products were shared with other requests and may have lost the last bit by it."""

    @property
    def unread_scores(self) -> PromptScores | None:
        """`prompt_scores`, while tokens of the prompt are still to be read."""
        scores = self.prompt_scores
        return scores if scores is not None and scores.wanted else None

    def check_wanted(self) -> None:
        """Raises RequestCancelledError where the answer has been given up."""
        if self.cancelled.is_set():
            raise RequestCancelledError(f"request {self.number} was cancelled")

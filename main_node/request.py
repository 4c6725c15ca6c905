"""One request: all that the main node keeps of it, from `MainNode.generate` to its report."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from main_node.checks.audits import Case
from main_node.checks.suspects import Source
from main_node.choosing.chooser import Chooser
from main_node.choosing.prompt_scores import PromptScores
from main_node.drafting import Drafts
from main_node.engine.sequence import Sequence
from main_node.logprobs import TokenLogprobs
from main_node.prediction_filter import Window
from scheduler.errors import RequestCancelledError, RequestFailedError
from wire import runtime


@dataclass(slots=True, eq=False)
class Request:
    """The engine finds it by its number while it is open; everybody else is handed it.

    Its own thread changes it, or the model's thread while that one waits for a pass. The fields at the end have locks.
    """

    number: int
    sequence: Sequence
    """Tokens and KV cache."""
    chooser: Chooser
    stopped: Callable[[int], bool] | None = None
    """Takes every token in order; True once the answer has reached a stop text."""
    logprobs: deque[TokenLogprobs] = field(default_factory=deque)
    """Of tokens that were chosen and not shown yet, in their order; empty where nobody wants them."""
    prompt_scores: PromptScores | None = None
    """Where log-probabilities of the prompt are wanted."""
    drafts: Drafts | None = None
    """Of the next tokens, while it computes and where any are made. Thread-safe; whoever uses them reads this once."""
    cancelled: runtime.Event = field(default_factory=lambda: runtime.Event())
    """Set from any thread."""
    last_rows: dict[int, tuple[int, torch.Tensor]] = field(default_factory=dict)
    """By layer, for a predictor that learns: a position, and the gate's input from which it was predicted."""

    prefill_passes: int = 0
    """Passes that have read the prompt."""
    read_again: int = 0
    """Times that all tokens so far were read again, as the model's own generation does."""
    chunked: bool = False
    """Some of its tokens were read in chunks."""
    cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache had."""
    is_cut: bool = False
    """Its prompt was cut at blocks of the prefix cache."""
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

    # With the lock of `Steps`.
    is_decoding: bool = False
    """It has its first token."""

    # With the engine's lock, `window` as `PredictionFilter` says.
    window: Window = field(init=False)
    """What the shadow may predict."""
    is_answered: bool = False
    """No pass follows: it has its last token, or ends without. Predictions may still come."""
    failure: tuple[type[RequestFailedError], str] | None = None
    """How and why it failed."""
    is_shared: bool = False
    """Another request was opened beside it."""
    sources: set[Source] = field(default_factory=set)
    """Workers with an output in the answer."""
    is_doubted: bool = False
    """The answer may have a wrong output."""
    has_unusable_output: bool = False
    """An output was not finite twice, and no token has been chosen since. The model may turn it into finite logits."""
    largest_gains: dict[Source, tuple[float, Case]] = field(default_factory=dict)
    """Of each worker the row of its outputs that grew most, and how many times."""

    def __post_init__(self) -> None:
        prompt_tokens = len(self.sequence.prompt)
        self.window = Window(prompt_tokens, prompt_tokens + self.sequence.max_new_tokens)

    @property
    def unread_scores(self) -> PromptScores | None:
        """`prompt_scores`, while tokens of the prompt are still to be read."""
        scores = self.prompt_scores
        return scores if scores is not None and scores.unscored_tokens else None

    def check_wanted(self) -> None:
        """Raises RequestCancelledError where the answer has been given up."""
        if self.cancelled.is_set():
            raise RequestCancelledError(f"request {self.number} was cancelled")

    def forget_predictions(self) -> None:
        """No pass follows: give up what predicts the next one. A pass that is still under way may see it go."""
        self.drafts = None
        self.last_rows.clear()

    def forget_outputs(self) -> None:
        """Nothing follows: give up what its outputs would be checked with. With the engine's lock held."""
        self.sources.clear()
        self.largest_gains.clear()

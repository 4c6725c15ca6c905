"""Sums of the figures of all requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from scheduler.core.stats import RequestStats
from scheduler.types import Pass


@dataclass(slots=True)
class Totals:
    """What the requests of a main node have cost so far. Seconds; the fields of a `Report` have its names and meanings.

    Not thread-safe: the engine holds its lock.
    """

    prompt_tokens: int = 0
    """Tokens of prompts in passes that have begun."""
    cached_tokens: int = 0
    """Tokens of prompts that the prefix cache had."""
    answer_tokens: int = 0
    loads: int = 0
    prefill_loads: int = 0
    reloads: int = 0
    unused_loads: int = 0
    named: int = 0
    hits: int = 0
    host_computed: int = 0
    late_predictions: int = 0
    predicted: int = 0
    """Activated experts that the prediction of their layer had named, late ones too: over `activated` this is the
    recall."""
    activated: int = 0
    """Experts of decoding's gates whose layer was predicted."""
    unpredicted: int = 0
    stall_s: float = 0.0
    prefill_stall_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    steps: Counter[int] = field(default_factory=Counter)
    """Requests with a pass in a step -> steps of so many."""

    def begin_step(self, passes: Iterable[Pass]) -> None:
        """A step of these passes begins."""
        count = 0
        for one in passes:
            count += 1
            if one.prefill:
                self.prompt_tokens += one.tokens
        self.steps[count] += 1

    def add(self, stats: RequestStats) -> None:
        """A request's figures so far."""
        self.loads += stats.loads
        self.prefill_loads += stats.loads - stats.decode_loads
        self.reloads += stats.reloads
        self.unused_loads += stats.unused
        self.named += stats.named
        self.hits += stats.present
        self.host_computed += stats.decode_host_calls
        self.late_predictions += stats.late
        self.predicted += stats.overall.correct
        self.activated += stats.overall.activated
        self.unpredicted += stats.unpredicted
        self.stall_s += stats.stall_s
        self.prefill_stall_s += stats.prefill_stall_s

    def copy(self) -> Totals:
        return replace(self, steps=self.steps.copy())

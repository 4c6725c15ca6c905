"""All that a scheduler is made with, as plain values that can be written down."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.alignment import Alignment
from scheduler.types import ModelShape

PREFILLS = ("ahead", "pipelined", "in-turn")


@dataclass(frozen=True, slots=True)
class Choices:
    """See `Core`; the five choices by name, as the settings have them (`placement`: where an expert is computed).

    `alpha`: how near the first unchosen score a chosen one counts as low (`expert-cache`), or up to which share of a
    row's chosen weight its least experts are skipped (`skip`). `prefetch`: how many experts a predictor brings at most;
    None: its own number.
    """

    shape: ModelShape
    group_size: int
    alignment: Alignment = field(default_factory=Alignment)
    mini_batch: int | None = None
    predictor: str = "sep"
    residency: str = "none"
    prefill: str = "ahead"
    router: str = "top-k"
    placement: str = "device"
    precision: str = "full"
    alpha: float | None = None
    prefetch: int | None = None

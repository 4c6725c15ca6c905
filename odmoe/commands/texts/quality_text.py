"""The figures of `odmoe verify --quality` as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from odmoe.quality.quality import Interval, Quality


def as_text(quality: Quality) -> str:
    """Four lines. Intervals are of 95 %."""
    of, low_high = quality.divergence, quality.divergence_interval
    return "\n".join(
        [
            f"{quality.model}, {quality.dtype}: experts in {quality.experts}, beside those of the checkpoint",
            f"  perplexity       {quality.perplexity:.4g} instead of {quality.original_perplexity:.4g}: "
            f"{quality.ratio - 1:+.2%} ({_shares(quality.ratio_interval)})",
            f"  KL divergence    {of:.4f} nats a token ({low_high[0]:.4f} to {low_high[1]:.4f})",
            f"  same best token  {quality.same_best:.1%}",
            f"  text             {quality.tokens:,} tokens in {quality.passages} passages of {quality.text}; intervals "
            "of 95%, by bootstrap over passages",
        ]
    )


def _shares(interval: Interval) -> str:
    return f"{interval[0] - 1:+.2%} to {interval[1] - 1:+.2%}"

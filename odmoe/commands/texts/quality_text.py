"""The figures of `odmoe verify --quality` as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from odmoe.quality.quality import Interval, Quality, Scored


def as_text(quality: Quality) -> str:
    """Five lines, and one for each task. Intervals are of 95 %."""
    of, low_high = quality.divergence, quality.divergence_interval
    lines = [
        f"{quality.model}, {quality.dtype}: experts in {quality.experts}, beside those of the checkpoint",
        f"  perplexity       {quality.perplexity:.4g} instead of {quality.original_perplexity:.4g}: "
        f"{quality.ratio - 1:+.2%} ({_shares(quality.ratio_interval)})",
        f"  KL divergence    {of:.4f} nats a token ({low_high[0]:.4f} to {low_high[1]:.4f})",
        f"  same best token  {quality.same_best:.1%}",
        *map(_task, quality.tasks),
        f"  text             {quality.tokens:,} tokens in {quality.passages} passages of {quality.text}",
        "  intervals        95%, paired, by bootstrap over passages and items",
    ]
    if quality.missing:
        lines.append(f"  not there        {', '.join(quality.missing)}: their files are not beside the table")
    return "\n".join(lines)


def _task(one: Scored) -> str:
    low, high = one.difference_interval
    if one.form == "text":
        return (
            f"  {one.name:<16} {one.changed:.4f} instead of {one.original:.4f} nats a token: {one.difference:+.4f} "
            f"({low:+.4f} to {high:+.4f}), {one.items} items"
        )
    return (
        f"  {one.name:<16} {one.changed:.1%} right instead of {one.original:.1%}: {one.difference * 100:+.1f} points "
        f"({low * 100:+.1f} to {high * 100:+.1f}), {one.items} items"
    )


def _shares(interval: Interval) -> str:
    return f"{interval[0] - 1:+.2%} to {interval[1] - 1:+.2%}"

"""The verdict of `odmoe verify` as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from odmoe.commands.shared.comparison import Comparison, Verdict


def as_text(verdict: Verdict, tokenizer: Any) -> str:
    """A line a prompt, then the verdict."""
    lines = [f"{verdict.model}, {verdict.dtype} on {verdict.device}: {verdict.system}, {verdict.cluster}"]
    lines += [f"  prompt {n}: {_prompt(one, tokenizer)}" for n, one in enumerate(verdict.prompts, 1)]
    return "\n".join([*lines, _verdict(verdict)])


def _prompt(one: Comparison, tokenizer: Any) -> str:
    if one.difference is None:
        return f"{one.tokens} of {one.tokens} tokens equal, {_logits(one)}"
    found = one.difference
    ours, theirs = (repr(tokenizer.decode([token])) for token in (found.token, found.reference))
    best, second = found.logits
    return (
        f"{one.equal_tokens} of {one.tokens} tokens equal, then {ours} where Transformers has {theirs} (its best "
        f"logits: {best:.6g} and {second:.6g}); {_logits(one)}"
    )


def _logits(one: Comparison) -> str:
    if not one.logits:
        return "logits not compared, because they stay on the main node"
    if not one.finite:
        return "logits are not finite"
    if one.bit_equal_logits == one.logits:
        return "logits equal bit for bit"
    within = "rounding" if one.logit_difference <= one.rounding else "more than rounding"
    return f"logits differ by {one.logit_difference:.1e} of the largest: {within}"


def _verdict(verdict: Verdict) -> str:
    total = sum(one.tokens for one in verdict.prompts)
    equal = sum(one.equal_tokens for one in verdict.prompts)
    if verdict.verdict == "exact":
        of = f" with this store's weights ({', '.join(verdict.weights)})" if verdict.weights else ""
        return f"Exact: all {total} tokens equal those of Transformers{of}."
    if verdict.verdict == "approximate":
        return (
            f"Approximate: {verdict.approximate}. {equal} of {total} tokens equal those of Transformers, counted up to "
            "each answer's first difference."
        )
    broken = [n for n, one in enumerate(verdict.prompts, 1) if not one.finite]
    if broken:
        return (
            f"Wrong: logits in the answers to {_prompt_numbers(broken)} of {len(verdict.prompts)} are infinite or NaN."
        )
    where = _prompt_numbers([n for n, one in enumerate(verdict.prompts, 1) if not one.exact])
    text = f"Not exact: the answers to {where} of {len(verdict.prompts)} differ from those of Transformers."
    ties = [one for one in verdict.prompts if one.difference is not None]
    if ties and all(one.difference.near_tie for one in ties if one.difference):
        text += (
            " At each difference the logits of the two best tokens are equal up to rounding, so rounding decides. With "
            "--mini-batch 4096, prefill multiplies matrices of the same shapes as Transformers."
        )
    return text


def _prompt_numbers(prompts: list[int]) -> str:
    return f"{'prompt' if len(prompts) == 1 else 'prompts'} {', '.join(map(str, prompts))}"

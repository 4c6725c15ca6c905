"""Log-probabilities as each of the two APIs writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

LEAST = -9999.0
"""What OpenAI writes for a token that is next to impossible. JSON has no infinity."""

if TYPE_CHECKING:
    from main_node.logprobs import TokenLogprobs
    from odmoe.token_texts import Offsets, TokenTexts


def of_completion(
    texts: TokenTexts, found: Sequence[TokenLogprobs | None], ids: Sequence[int], offsets: Offsets
) -> dict[str, Any]:
    """`tokens`, `token_logprobs`, `top_logprobs`, `text_offset`, an entry a token of `ids`. `offsets`: those of the
    choice's text. A token without log-probabilities, a prompt's first, has null."""
    return {
        "tokens": [texts.text_of(token) for token in ids],
        "token_logprobs": [max(one.logprob, LEAST) if one is not None else None for one in found],
        "top_logprobs": [_by_text(texts, one) if one is not None else None for one in found],
        "text_offset": offsets.offsets_of(ids),
    }


def _by_text(texts: TokenTexts, one: TokenLogprobs) -> dict[str, float]:
    """The most probable tokens and the token itself. Of several tokens with one text, the most probable one."""
    found: dict[str, float] = {}
    for token, logprob in (*one.top, (one.token_id, one.logprob)):
        text = texts.text_of(token)
        found[text] = max(logprob, found.get(text, LEAST))
    return found


def of_chat(texts: TokenTexts, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`content`, an entry a token, and `refusal`."""
    content = [
        {
            **_entry(texts, one.token_id, one.logprob),
            "top_logprobs": [_entry(texts, token, logprob) for token, logprob in one.top],
        }
        for one in found
    ]
    return {"content": content, "refusal": None}


def _entry(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.text_of(token), "logprob": max(logprob, LEAST), "bytes": list(texts.bytes_of(token))}

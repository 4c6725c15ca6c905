"""Answers that follow a JSON schema, by llguidance: before each token, which ones keep the text within the schema."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odmoe.text import load_tokenizer
from scheduler.errors import ConfigError, RequestFailedError

if TYPE_CHECKING:
    import torch

    from main_node.choosing.guide import Guides

WHITESPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,40}"
"""Between two parts of the JSON: blanks, or a new line and its indentation. Without a bound, a model that does not know
how to go on writes blanks until it is cut. A schema's own `x-guidance` may say otherwise."""
LARK = "%llguidance"
"""With it begins what is a grammar of llguidance's Lark in place of a schema."""


class JsonGuide:
    """Of one answer, as `main_node.choosing.guide.Guide`."""

    def __init__(self, matcher: Any, unwanted: tuple[int, ...], vocabulary: int) -> None:
        """`unwanted`: tokens that llguidance takes for the end of a sequence, and the model does not."""
        self._matcher = matcher
        self._unwanted = list(unwanted)
        self._vocabulary = vocabulary

    def allowed_tokens(self) -> torch.Tensor:
        import numpy as np
        import torch

        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        bits = np.unpackbits(packed, count=self._vocabulary, bitorder="little")
        bits[self._unwanted] = 0
        return torch.from_numpy(bits.view(bool))

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestFailedError(
                f"the schema cannot be followed any further: {_short(self._matcher.get_error())}; change the schema"
            )


class JsonGuides:
    """Makes guides, in any thread."""

    def __init__(self, folder: Path, read: Callable[[], Any] | None = None) -> None:
        """`read`: gives the tokenizer in `folder`; None: it is read for the first guide."""
        self._tokenizer = read or partial(load_tokenizer, folder)
        self._lock = threading.Lock()
        self._read: dict[tuple[frozenset[int], int], tuple[Any, tuple[int, ...]]] = {}
        """By end-of-sequence tokens and tokens of the vocabulary: llguidance's tokenizer, and `JsonGuide.unwanted`."""

    def __call__(self, schema: str, ends: frozenset[int], vocabulary: int) -> JsonGuide:
        """Raises ConfigError."""
        from llguidance import LLMatcher, LLParserLimits

        is_lark = schema.startswith(LARK)
        parsed = {} if is_lark else _parse_schema(schema)
        with self._lock:
            known = self._read.get((ends, vocabulary))
            if known is None:
                known = self._read[ends, vocabulary] = _tokens(self._tokenizer(), ends, vocabulary)
        tokens, unwanted = known
        try:
            if is_lark:
                grammar = LLMatcher.grammar_from_lark(schema)
            else:
                grammar = LLMatcher.grammar_from_json_schema(parsed, defaults=_defaults(parsed))
        except ValueError as error:  # a text with half of a surrogate pair
            raise ConfigError(f"the schema is refused: {_short(str(error))}; change the schema") from error
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if matcher.is_error():
            raise ConfigError(f"the schema is refused: {_short(matcher.get_error())}; change the schema")
        guide = JsonGuide(matcher, unwanted, vocabulary)
        matcher.compute_bitmask()
        if matcher.is_error() or not guide.allowed_tokens().any():
            raise ConfigError(
                "the schema is refused: this model has no token to begin a text that follows it; change it"
            )
        return guide


def make_guides(folder: Path, read: Callable[[], Any] | None = None) -> Guides:
    """(JSON schema or grammar, end-of-sequence tokens, tokens of the vocabulary) -> the guide of an answer that follows
    it, as text of the tokenizer in `folder`. `read`: gives it; None: it is read for the first guide."""
    return JsonGuides(folder, read)


def _parse_schema(schema: str) -> dict[str, Any]:
    try:
        parsed = json.loads(schema, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the schema is no JSON ({error}); give a JSON schema") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f'the schema is {schema[:40]}; give a JSON object, such as {{"type": "object"}}')
    return parsed


def with_whitespace(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema for a grammar, where defaults have no other place."""
    options = _defaults(schema)
    return {**schema, "x-guidance": {**schema.get("x-guidance", {}), **options}} if options else schema


def _defaults(schema: dict[str, Any]) -> Any:
    options = schema.get("x-guidance")
    own = isinstance(options, dict) and not options.keys().isdisjoint({"whitespace_flexible", "whitespace_pattern"})
    return {} if own else {"whitespace_pattern": WHITESPACE}


def _refuse_constant(number: str) -> None:
    raise ValueError(f"{number} is no number of JSON")


def _tokens(tokenizer: Any, ends: frozenset[int], vocabulary: int) -> tuple[Any, tuple[int, ...]]:
    """llguidance's tokenizer. It must have an end-of-sequence token: where the model has none, one that is unwanted."""
    from llguidance.hf import from_tokenizer

    known = [token for token in sorted(ends) if token < len(tokenizer)]
    own = (tokenizer.eos_token_id, *tokenizer.all_special_ids, len(tokenizer) - 1)
    unwanted = () if known else (next(token for token in own if token is not None),)
    try:
        made = from_tokenizer(tokenizer, max(vocabulary, len(tokenizer)), known or list(unwanted))
    except Exception as error:  # the library raises what its parts do
        raise ConfigError(
            f"answers of this model cannot follow a schema: llguidance cannot read its tokenizer, a "
            f"{type(tokenizer).__name__} ({_short(str(error))}); leave the schema out, or use a model with a "
            "tokenizer.json"
        ) from error
    return made, unwanted


def _short(message: str) -> str:
    """On one line, and without the parser's state."""
    return " ".join(message.partition("<non-verbose/>")[0].split())[:300].rstrip(" .")
